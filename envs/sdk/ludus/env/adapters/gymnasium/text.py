"""How a language model sees any Gymnasium environment, and what it may answer.

Discrete actions are answered by name where names are known, else by number; all others
as JSON. Numbers of observations have names where the environment is a known one. Where the
environment can draw itself as text (`render_mode="ansi"`), that is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ludus.env.adapters.gymnasium.known import Play
from ludus.env.text.answers import extract_answer
from ludus.env.types import Action, JsonObject, Message, Observation
from ludus.proto.errors import ActionParseError

_COLOURED = re.compile(r"\x1b\[(?!0m)([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_NUMBER = re.compile(r"-?[0-9]{1,18}")
"""What Python takes for an integer, and not what looks like one: no signs in a row, no other
scripts' digits, nothing longer than it will convert."""

MAX_LISTED_ACTIONS = 256
"""More discrete actions than these are told by their range."""
_DIGITS = "You see it as rows of digits, from 0 for black to 9 for white."


class GymnasiumRenderer:
    """Text for one environment.

    Args:
        action_type: what `parse` makes.
        first_action: the number of the first discrete action; None for other actions.
    """

    def __init__(
        self,
        env_name: str,
        action_type: type[Action],
        first_action: int | None,
        num_actions: int,
        play: Play,
    ) -> None:
        self._action_type = action_type
        numbers = [] if first_action is None else range(first_action, first_action + num_actions)
        self.play = play
        self._name_of = {
            number: play.names[index] if index < len(play.names) else str(number)
            for index, number in enumerate(numbers)
        }
        self._number_of = {name.casefold(): number for number, name in self._name_of.items()}
        self._intro = f"You play {env_name}. {play.instructions}".strip()

    def render(self, observation: Observation, *, first: bool) -> list[Message]:
        """One message: the picture where there is one, the numbers, and what to answer."""
        shown: JsonObject = dict(observation)
        parts = [self._intro, self._ask()] if first else []
        if first and shown.get("picture"):
            parts.insert(1, _DIGITS)
        parts += [shown[drawn] for drawn in ("rendered", "picture") if shown.get(drawn)]
        if shown.get("observation") is not None:
            parts.append(f"Observation: {self._told(shown['observation'])}")
        return [{"role": "user", "content": "\n".join(parts) or "No observation."}]

    def parse(self, text: str, observation: Observation) -> Action:
        """The action that the text names: the last <answer>, or the whole text."""
        said = extract_answer(text)
        if not self._number_of:
            return self._parse_json(said)
        number = self._number_of.get(said.casefold())
        if number is None and _NUMBER.fullmatch(said) and int(said) in self._name_of:
            number = int(said)
        if number is None:
            number = self._only_mention(said)
        if number is None:
            raise ActionParseError(f"expected one of {self._offered()}; got {text[-200:]!r}")
        return self._action_type.model_validate({"action": number})

    def legal_answers(self, observation: Observation) -> list[str]:
        """The names of the legal actions; empty where they cannot be listed."""
        legal: Sequence[int] = getattr(observation, "legal_actions", None) or ()
        return [self._name_of[number] for number in legal]

    def _ask(self) -> str:
        if self._name_of:
            return f"Answer with one of: {self._offered()}."
        schema = self._action_type.model_json_schema()["properties"]["action"]
        controls = ", ".join(self.play.controls)
        said = f" Its numbers are: {controls}." if controls else ""
        return f"Answer with JSON that fits this schema: {json.dumps(schema)}{said}"

    def _offered(self) -> str:
        if len(self._name_of) <= MAX_LISTED_ACTIONS:
            return ", ".join(self._name_of.values())
        return f"the numbers from {min(self._name_of)} to {max(self._name_of)}"

    def _told(self, observation: Any) -> str:
        """The observation, its numbers by name where they have names."""
        names: Sequence[str] = ()
        if isinstance(observation, list | tuple):
            names = self.play.names_of(len(observation))
        if not names:
            return _short(observation)
        told = ", ".join(
            f"{name}: {_short(value)}" for name, value in zip(names, observation, strict=False)
        )
        more = observation[len(names) :]
        return f"{told}, and {len(more)} more: {_short(more)}" if more else told

    def _only_mention(self, text: str) -> int | None:
        """The action whose name the text holds, where it holds no other."""
        words = {word.casefold() for word in re.findall(r"\w+", text)}
        found = [number for name, number in self._number_of.items() if name in words]
        return found[0] if len(found) == 1 else None

    def _parse_json(self, text: str) -> Action:
        try:
            return self._action_type.model_validate({"action": json.loads(text)})
        except (ValueError, RecursionError) as error:
            # Not JSON, not of the space, or nested or long beyond what Python reads.
            raise ActionParseError(
                f"expected an action as JSON, got {text[-200:]!r}: {error}"
            ) from None


def without_colours(picture: str, marks: Mapping[str, str]) -> str:
    """The text with coloured parts in brackets: colour is how environments mark places."""

    def marked(found: re.Match[str]) -> str:
        meaning = marks.get(found[1], "")
        return f"[{meaning} {found[2].strip()}".rstrip() + "]" if meaning else f"[{found[2]}]"

    return _ESCAPE.sub("", _COLOURED.sub(marked, picture)).strip("\n")


def _short(value: Any) -> str:
    """Numbers with as many digits as a reader needs."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_short(item) for item in value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_short(item)}" for name, item in value.items())
    return str(value)

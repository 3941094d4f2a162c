"""How a language model sees any Gymnasium environment, and what it may answer.

Discrete actions are answered by name where names are known, else by number; all others
as JSON. Where the environment can draw itself as text (`render_mode="ansi"`), that is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.env.types import Action, JsonObject, Message, Observation
from ludus.proto.errors import ActionParseError

_COLOURED = re.compile(r"\x1b\[(?!0m)([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"-?[0-9]{1,18}")
"""What Python takes for an integer, and not what looks like one: no signs in a row, no other
scripts' digits, nothing longer than it will convert."""
_THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Play:
    """What is known of an environment beyond its spaces."""

    names: tuple[str, ...] = ()
    """One for each discrete action, in order."""
    instructions: str = ""
    when_slippery: str = ""
    """Said after the instructions where the option `is_slippery` is on."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """What a colour in the picture means, by its code in the terminal."""


KNOWN: dict[str, Play] = {
    "FrozenLake": Play(
        ("LEFT", "DOWN", "RIGHT", "UP"),
        "Cross the frozen lake from the start S to the goal G. F is ice, and a hole H ends the"
        " game. [ ] marks where you are.",
        "You may slip sideways.",
    ),
    "CliffWalking": Play(
        ("UP", "RIGHT", "DOWN", "LEFT"),
        "Walk from the lower left to the goal T in few steps. x is you; the cliff C costs 100"
        " and sends you back.",
        "You may slip sideways.",
    ),
    "Taxi": Play(
        ("SOUTH", "NORTH", "EAST", "WEST", "PICKUP", "DROPOFF"),
        "Drive the taxi to the passenger, PICKUP, drive to the destination, DROPOFF. Both are"
        " among R, G, Y, B; | is a wall.",
        marks={"34;1": "passenger", "35": "destination", "43": "taxi", "42": "taxi with passenger"},
    ),
    "Blackjack": Play(
        ("STICK", "HIT"),
        "You play blackjack. The observation is your sum, the dealer's open card (1 is an ace),"
        " and whether you hold an ace that counts 11 (1) or not (0).",
    ),
    "CartPole": Play(
        ("LEFT", "RIGHT"),
        "Push the cart so that the pole stays up. The observation is the cart's position and"
        " speed, and the pole's angle (radians, right is positive) and angular speed.",
    ),
    "MountainCar": Play(
        ("LEFT", "COAST", "RIGHT"),
        "Get the car out of the valley to position 0.5. The observation is position and speed.",
    ),
    "Acrobot": Play(
        ("NEGATIVE", "NONE", "POSITIVE"),
        "Swing the lower link above the line by torque on the joint between the links.",
    ),
    "LunarLander": Play(
        ("NOTHING", "LEFT", "MAIN", "RIGHT"),
        "Land at (0, 0) by firing engines. The observation is x, y, their speeds, angle, angular"
        " speed, and whether each leg touches the ground.",
    ),
}
"""By the environment's name without version."""


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
        if shown.get("rendered"):
            parts.append(shown["rendered"])
        if shown.get("observation") is not None:
            parts.append(f"Observation: {_short(shown['observation'])}")
        return [{"role": "user", "content": "\n".join(parts) or "No observation."}]

    def parse(self, text: str, observation: Observation) -> Action:
        """The action that the text names: the last <answer>, or the whole text."""
        spoken = _THOUGHT.sub("", text)
        answers = _ANSWER.findall(spoken)
        said = (answers[-1] if answers else spoken).strip()
        if not self._number_of:
            return self._parse_json(said)
        number = self._number_of.get(said.casefold())
        if number is None and _NUMBER.fullmatch(said) and int(said) in self._name_of:
            number = int(said)
        if number is None:
            number = self._only_mention(said)
        if number is None:
            offered = ", ".join(self._name_of.values())
            raise ActionParseError(f"expected one of {offered}; got {text[-200:]!r}")
        return self._action_type.model_validate({"action": number})

    def legal_answers(self, observation: Observation) -> list[str]:
        """The names of the legal actions; empty where they cannot be listed."""
        legal: Sequence[int] = getattr(observation, "legal_actions", ())
        return [self._name_of[number] for number in legal]

    def _ask(self) -> str:
        if self._name_of:
            return f"Answer with one of: {', '.join(self._name_of.values())}."
        schema = self._action_type.model_json_schema()["properties"]["action"]
        return f"Answer with JSON that fits this schema: {json.dumps(schema)}"

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

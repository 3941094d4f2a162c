"""The text renderer of Gymnasium environments for language models.

Discrete actions are answered by name, or by number if they have no names. Other actions are JSON.
The numbers of observations have names if there is a guide to the environment. An environment that
can draw itself as text (`render_mode="ansi"`) is shown as that text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ludus.env.adapters.gymnasium.guides import Guide
from ludus.env.text.answers import extract_answer
from ludus.env.types import Action, JsonObject, Message, Observation
from ludus.proto.errors import ActionParseError

_COLORED = re.compile(r"\x1b\[(?!0m)([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_NUMBER = re.compile(r"-?[0-9]{1,18}")
"""An integer that Python can convert: one sign, ASCII digits and a limited length."""

MAX_LISTED_ACTIONS = 256
"""Number of discrete actions above which the text contains only their range."""
_DIGITS = "You see it as rows of digits, from 0 for black to 9 for white."


class GymnasiumRenderer:
    """A text renderer for one environment.

    Args:
        action_type: type of the actions that `parse` returns.
        first_action: number of the first discrete action; None for other actions.
    """

    def __init__(
        self,
        env_name: str,
        action_type: type[Action],
        first_action: int | None,
        num_actions: int,
        guide: Guide,
    ) -> None:
        self._action_type = action_type
        numbers = [] if first_action is None else range(first_action, first_action + num_actions)
        self.guide = guide
        self._names = {
            number: guide.names[index] if index < len(guide.names) else str(number)
            for index, number in enumerate(numbers)
        }
        self._numbers = {name.casefold(): number for number, name in self._names.items()}
        self._intro = f"You play {env_name}. {guide.instructions}".strip()

    def render(self, observation: Observation, *, first: bool) -> list[Message]:
        """Return one message with the picture and the numbers, and first with the instructions."""
        fields: JsonObject = dict(observation)
        parts = [self._intro, self._answer_instructions()] if first else []
        if first and fields.get("picture"):
            parts.insert(1, _DIGITS)
        parts += [fields[name] for name in ("rendered", "picture") if fields.get(name)]
        if fields.get("observation") is not None:
            parts.append(f"Observation: {self._format_observation(fields['observation'])}")
        return [{"role": "user", "content": "\n".join(parts) or "No observation."}]

    def parse(self, text: str, observation: Observation) -> Action:
        """Return the action in the last <answer>, or in the complete text."""
        answer = extract_answer(text)
        if not self._numbers:
            return self._parse_json(answer)
        number = self._numbers.get(answer.casefold())
        if number is None and _NUMBER.fullmatch(answer) and int(answer) in self._names:
            number = int(answer)
        if number is None:
            number = self._find_only_name(answer)
        if number is None:
            raise ActionParseError(f"expected one of {self._list_actions()}; got {text[-200:]!r}")
        return self._action_type.model_validate({"action": number})

    def legal_answers(self, observation: Observation) -> list[str]:
        """Return the names of the legal actions; empty if they cannot be listed."""
        legal: Sequence[int] = getattr(observation, "legal_actions", None) or ()
        return [self._names[number] for number in legal]

    def _answer_instructions(self) -> str:
        if self._names:
            return f"Answer with one of: {self._list_actions()}."
        schema = self._action_type.model_json_schema()["properties"]["action"]
        controls = ", ".join(self.guide.controls)
        control_text = f" Its numbers are: {controls}." if controls else ""
        return f"Answer with JSON that fits this schema: {json.dumps(schema)}{control_text}"

    def _list_actions(self) -> str:
        if len(self._names) <= MAX_LISTED_ACTIONS:
            return ", ".join(self._names.values())
        return f"the numbers from {min(self._names)} to {max(self._names)}"

    def _format_observation(self, observation: Any) -> str:
        """Return the observation as text, with the names of its numbers if they have names."""
        names: Sequence[str] = ()
        if isinstance(observation, list | tuple):
            names = self.guide.number_names(len(observation))
        if not names:
            return _format_value(observation)
        text = ", ".join(
            f"{name}: {_format_value(value)}"
            for name, value in zip(names, observation, strict=False)
        )
        unnamed = observation[len(names) :]
        if not unnamed:
            return text
        return f"{text}, and {len(unnamed)} more: {_format_value(unnamed)}"

    def _find_only_name(self, text: str) -> int | None:
        """Return the action that the text names, or None if it names none or several."""
        words = {word.casefold() for word in re.findall(r"\w+", text)}
        numbers = [number for name, number in self._numbers.items() if name in words]
        return numbers[0] if len(numbers) == 1 else None

    def _parse_json(self, text: str) -> Action:
        try:
            return self._action_type.model_validate({"action": json.loads(text)})
        except (ValueError, RecursionError) as error:
            # The text is not JSON, not in the space, or too long or too deeply nested for Python.
            raise ActionParseError(
                f"expected an action as JSON, got {text[-200:]!r}: {error}"
            ) from None


def replace_colors(picture: str, marks: Mapping[str, str]) -> str:
    """Put colored parts in brackets, because environments mark positions by color."""

    def mark(match: re.Match[str]) -> str:
        meaning = marks.get(match[1], "")
        return f"[{meaning} {match[2].strip()}".rstrip() + "]" if meaning else f"[{match[2]}]"

    return _ESCAPE.sub("", _COLORED.sub(mark, picture)).strip("\n")


def _format_value(value: Any) -> str:
    """Format a value, with four digits per number."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format_value(item) for item in value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_format_value(item)}" for name, item in value.items())
    return str(value)

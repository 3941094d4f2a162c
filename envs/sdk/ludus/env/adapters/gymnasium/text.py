"""The text renderer of Gymnasium environments for language models.

Discrete actions are answered by name, or by number if they have no names. Other actions are JSON.
The numbers of observations have names if there is a guide to the environment. An environment that
can draw itself as text (`render_mode="ansi"`) is shown as that text. Pictures are rows of digits,
for language models without vision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from ludus.env.adapters.gymnasium.guides import Guide
from ludus.env.adapters.gymnasium.spaces import AnySpace
from ludus.env.text import extract_answer
from ludus.env.types import Action, JsonObject, Message, Observation
from ludus.proto.errors import ActionParseError, ConfigError

_COLORED = re.compile(r"\x1b\[(?!0m)([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_NUMBER = re.compile(r"-?[0-9]{1,18}")
"""An integer that Python can convert: one sign, ASCII digits and a limited length."""

MAX_LISTED_ACTIONS = 256
"""Number of discrete actions above which the text contains only their range."""
_NUM_SHADES = 10
_DIGITS = "You see it as rows of digits, from 0 for black to 9 for white."


class GymnasiumRenderer:
    """A text renderer for one environment.

    Args:
        action_type: type of the actions that `parse` returns.
    """

    def __init__(
        self, env_name: str, action_type: type[Action], space: AnySpace, guide: Guide
    ) -> None:
        self._action_type = action_type
        numbers: Sequence[int] = ()
        if isinstance(space, spaces.Discrete):
            numbers = range(int(space.start), int(space.start + space.n))
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


def require_picture(space: AnySpace, num_columns: int) -> None:
    """Check that a space consists of pictures with at least `num_columns` columns.

    Raises:
        ConfigError: its elements are not pictures, or they are narrower.
    """
    is_picture = isinstance(space, spaces.Box) and space.dtype == np.uint8
    shape = space.shape or ()
    if not is_picture or len(shape) not in (2, 3) or shape[2:] not in ((), (1,), (3,)):
        raise ConfigError(
            "picture_columns needs pictures of height x width, gray or with three colors,"
            f" got observations in {space}; remove it"
        )
    if type(num_columns) is not int or not 1 <= num_columns <= shape[1]:
        raise ConfigError(
            f"picture_columns must be 1 to {shape[1]}, the picture's width, got {num_columns!r}"
        )


def picture_rows(picture: np.ndarray, num_columns: int) -> str:
    """Draw a picture with `num_columns` columns and a proportional number of rows.

    Each digit is the mean brightness of its part, from 0 (black) to 9 (white).
    """
    gray = picture if picture.ndim == 2 else picture.mean(axis=2)
    num_rows = max(1, round(num_columns * gray.shape[0] / gray.shape[1]))
    tops = np.arange(num_rows) * gray.shape[0] // num_rows
    lefts = np.arange(num_columns) * gray.shape[1] // num_columns
    sums = np.add.reduceat(np.add.reduceat(gray.astype(np.float64), tops, 0), lefts, 1)
    heights = np.diff(np.append(tops, gray.shape[0]))
    widths = np.diff(np.append(lefts, gray.shape[1]))
    shades = (sums / np.outer(heights, widths) * _NUM_SHADES / 256).astype(int)
    return "\n".join("".join(map(str, row)) for row in shades)


def _format_value(value: Any) -> str:
    """Format a value, with four digits per number."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format_value(item) for item in value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_format_value(item)}" for name, item in value.items())
    return str(value)

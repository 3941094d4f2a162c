"""The text renderer of Gymnasium environments for language models.

A model answers with the name of a discrete action, or its number. Other actions are JSON.
The numbers of observations have names if there is a guide to the environment. An environment that
can draw itself as text (`render_mode="ansi"`) is shown as that text. A picture becomes rows of
digits for language models without vision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from ludus.env.adapters.gymnasium.guides import Guide
from ludus.env.adapters.gymnasium.spaces import AnySpace
from ludus.env.incoming.json_values import check_num_values
from ludus.env.text import extract_answer
from ludus.env.text.unicode import format_json, replace_surrogates
from ludus.env.types import Action, JsonObject, Message, Observation
from ludus.proto.errors import ActionParseError, ConfigError, InvalidCallError

_COLORED_TEXT = re.compile(r"\x1b\[(?!0m)[\d;]*m(.*?)\x1b\[0m", re.DOTALL)
_LAST_ACTION = re.compile(r"^\s*\(\w+\)\n|\n\s*\(\w+\)\s*\Z")
"""Line of a text picture with the name of the last action, which the player knows."""
_ESCAPE_CODE = re.compile(r"\x1b\[[\d;]*m")
_INTEGER = re.compile(r"-?[0-9]{1,18}")
"""An integer that Python can convert: one sign, ASCII digits and a limited length."""

MAX_LISTED_ACTIONS = 256
"""Number of discrete actions above which the text contains only their range."""
_NUM_SHADES = 10
_PICTURE_LEGEND = "You see it as rows of digits, from 0 for black to 9 for white."


class GymnasiumRenderer:
    """A text renderer for one environment.

    Args:
        action_type: type of the actions that `parse` returns.
    """

    def __init__(self, name: str, action_type: type[Action], space: AnySpace, guide: Guide) -> None:
        self._action_type = action_type
        action_numbers: Sequence[int] = ()
        if isinstance(space, spaces.Discrete):
            action_numbers = range(int(space.start), int(space.start + space.n))
        self.guide = guide
        self._names_by_number = {
            number: guide.action_names[index] if index < len(guide.action_names) else str(number)
            for index, number in enumerate(action_numbers)
        }
        self._numbers_by_name = {
            name.casefold(): number for number, name in self._names_by_number.items()
        }
        self._introduction = f"You play {name}. {guide.instructions}".strip()

    def render(self, observation: Observation, *, first: bool) -> list[Message]:
        """Return one message with the picture and the numbers, and first with instructions."""
        fields: JsonObject = dict(observation)
        lines = [self._introduction, self._make_answer_instructions()] if first else []
        if first and fields.get("picture"):
            lines.insert(1, _PICTURE_LEGEND)
        lines += [fields[name] for name in ("rendered", "picture") if fields.get(name)]
        is_complete = self.guide.has_complete_picture and fields.get("rendered")
        if fields.get("observation") is not None and not is_complete:
            lines.append(self._describe_observation(fields["observation"]))
        legal_names = self.legal_answers(observation)
        if 0 < len(legal_names) < len(self._names_by_number):
            lines.append(f"Legal now: {', '.join(legal_names)}.")
        return [{"role": "user", "content": "\n".join(lines) or "No observation."}]

    def parse(self, text: str, observation: Observation) -> Action:
        """Return the action in the last <answer>, or in the complete text."""
        answer = extract_answer(text)
        if not self._numbers_by_name:
            return self._parse_json(answer)
        number = self._numbers_by_name.get(answer.casefold())
        if number is None and _INTEGER.fullmatch(answer) and int(answer) in self._names_by_number:
            number = int(answer)
        if number is None:
            number = self._find_named_action(answer)
        if number is None:
            raise ActionParseError(f"expected one of {self._list_actions()}; got {text[-200:]!r}")
        return self._action_type.model_validate({"action": number})

    def legal_answers(self, observation: Observation) -> list[str]:
        """Return the names of the legal actions; empty if they cannot be listed."""
        legal_numbers: Sequence[int] = getattr(observation, "legal_actions", None) or ()
        return [self._names_by_number[number] for number in legal_numbers]

    def _make_answer_instructions(self) -> str:
        if self._names_by_number:
            return f"Answer with one of: {self._list_actions()}."
        schema = _read_action_schema(self._action_type)
        labels_text = ", ".join(self.guide.action_labels)
        label_sentence = f" Its numbers are: {labels_text}." if labels_text else ""
        return f"Answer with JSON that fits this schema: {format_json(schema)}{label_sentence}"

    def _list_actions(self) -> str:
        if len(self._names_by_number) <= MAX_LISTED_ACTIONS:
            return ", ".join(self._names_by_number.values())
        return f"the numbers from {min(self._names_by_number)} to {max(self._names_by_number)}"

    def _describe_observation(self, observation: Any) -> str:
        """Return the observation in the guide's sentences, or otherwise its numbers."""
        sentences = self.guide.describe(observation) if self.guide.describe is not None else ""
        return sentences or f"Observation: {self._format_observation(observation)}"

    def _format_observation(self, observation: Any) -> str:
        """Return the observation as text, with the names of its numbers if they have names."""
        labels: Sequence[str] = ()
        if isinstance(observation, list | tuple):
            labels = self.guide.find_observation_labels(len(observation))
        if not labels:
            return _format_value(observation)
        labeled_text = ", ".join(
            f"{label}: {_format_value(value)}"
            for label, value in zip(labels, observation, strict=False)
        )
        other_values = observation[len(labels) :]
        if not other_values:
            return labeled_text
        return f"{labeled_text}, and {len(other_values)} more: {_format_value(other_values)}"

    def _find_named_action(self, response: str) -> int | None:
        """Return the only action that the response names, or None if it names none or several."""
        words = {word.casefold() for word in re.findall(r"\w+", response)}
        matches = [number for name, number in self._numbers_by_name.items() if name in words]
        return matches[0] if len(matches) == 1 else None

    def _parse_json(self, response: str) -> Action:
        try:
            check_num_values(response)
            action = replace_surrogates(json.loads(response))
            return self._action_type.model_validate({"action": action})
        except InvalidCallError as error:
            raise ActionParseError(error.message) from None
        except (ValueError, RecursionError) as error:
            # The response is not JSON, not in the space, or nested too deeply for Python.
            raise ActionParseError(
                f"expected an action as JSON, got {response[-200:]!r}: {error}"
            ) from None


def _read_action_schema(action_type: type[Action]) -> JsonObject:
    """Return the schema of the field `action`, which contains its definitions instead of names."""
    schema = action_type.model_json_schema()
    definitions: JsonObject = schema.get("$defs", {})

    def inline(part: Any) -> Any:
        if isinstance(part, list):
            return [inline(element) for element in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inline(definitions[part["$ref"].rpartition("/")[2]])
        return {
            key: {name: inline(child) for name, child in value.items()}
            if key == "properties"
            else inline(value)
            for key, value in part.items()
            if key != "title"
        }

    inlined_schema: JsonObject = inline(schema["properties"]["action"])
    return inlined_schema


def clean_picture(picture: str, guide: Guide) -> str:
    """Return a text picture without colors and without the last action.

    If the guide describes the observation in words, the characters stay in their columns.
    Otherwise colored text is put in brackets, because environments mark positions by color.
    """
    picture = _LAST_ACTION.sub("", picture)
    if guide.describe is None:
        picture = _COLORED_TEXT.sub(r"[\1]", picture)
    return _ESCAPE_CODE.sub("", picture).strip("\n")


def require_picture(space: AnySpace, num_columns: int) -> None:
    """Check that a space consists of pictures with at least `num_columns` columns.

    Raises:
        ConfigError: the elements are not pictures, or the pictures are narrower.
    """
    is_picture = isinstance(space, spaces.Box) and space.dtype == np.uint8
    shape = space.shape or ()
    if not is_picture or len(shape) not in (2, 3) or shape[2:] not in ((), (1,), (3,)):
        raise ConfigError(
            "picture_columns needs pictures of height x width, gray or with three colors,"
            f" got observations in {space}; remove picture_columns"
        )
    if type(num_columns) is not int or not 1 <= num_columns <= shape[1]:
        raise ConfigError(
            f"picture_columns must be 1 to {shape[1]}, the picture's width, got {num_columns!r}"
        )


def draw_picture(picture: np.ndarray, num_columns: int) -> str:
    """Draw a picture with `num_columns` columns and a proportional number of rows.

    Each digit is the mean brightness of an area, from 0 (black) to 9 (white).
    """
    gray_picture = picture if picture.ndim == 2 else picture.mean(axis=2)
    num_rows = max(1, round(num_columns * gray_picture.shape[0] / gray_picture.shape[1]))
    row_starts = np.arange(num_rows) * gray_picture.shape[0] // num_rows
    column_starts = np.arange(num_columns) * gray_picture.shape[1] // num_columns
    row_sums = np.add.reduceat(gray_picture.astype(np.float64), row_starts, 0)
    area_sums = np.add.reduceat(row_sums, column_starts, 1)
    row_heights = np.diff(np.append(row_starts, gray_picture.shape[0]))
    column_widths = np.diff(np.append(column_starts, gray_picture.shape[1]))
    shades = (area_sums / np.outer(row_heights, column_widths) * _NUM_SHADES / 256).astype(int)
    return "\n".join("".join(map(str, row)) for row in shades)


def _format_value(value: Any) -> str:
    """Format a JSON value as text, with four digits per float."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format_value(element) for element in value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_format_value(element)}" for name, element in value.items())
    return str(value)

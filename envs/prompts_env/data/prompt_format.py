"""Conversion of a row into the messages of a prompt."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludus.env import Message
from ludus.env.types import find_extra_field, format_extra_field_error
from ludus.proto.errors import ConfigError, did_you_mean

_FUNCTIONS_COLUMN = "tools"
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """The prompt column, or a template over several columns.

    Raises:
        ConfigError: The template is invalid.
    """

    column: str = "prompt"
    """Column with text, or with a list of messages, {"role", "content"}."""
    template: str | None = None
    """Text with {column names}, used instead of the column."""
    system_prompt: str | None = None
    """System message before the prompt."""

    def __post_init__(self) -> None:
        _ = self.shown_columns

    @property
    def shown_columns(self) -> tuple[str, ...]:
        """The columns that appear in the prompt."""
        if self.template is None:
            return (self.column,)
        try:
            field_names = [name for _, name, _, _ in string.Formatter().parse(self.template)]
        except ValueError as error:
            raise ConfigError(
                f"template = {self.template!r}: {error}; write a literal brace twice"
            ) from None
        names = [name for name in field_names if name is not None]
        invalid_names = [
            name for name in names if not name or any(character in name for character in ".[]")
        ]
        if invalid_names or not names:
            invalid_text = repr(invalid_names[0]) if invalid_names else "none"
            raise ConfigError(
                f"template = {self.template!r} needs column names in braces, such as "
                f"{{question}}, got {invalid_text}"
            )
        return tuple(dict.fromkeys(names))

    def check_first_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a first row without one of the shown columns.

        Raises:
            ConfigError: A column is missing; the message lists the columns of the row.
        """
        option = "prompt" if self.template is None else "template"
        for name in self.shown_columns:
            require_column(option, name, tuple(row), "the first row")

    def make_messages(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the prompt of a row.

        Raises:
            ValueError: A shown column is missing or has the wrong type.
        """
        if self.template is None:
            _refuse_functions(row)
            messages = _read_messages(self.column, row)
        else:
            messages = [{"role": "user", "content": self._fill_template(self.template, row)}]
        if self.system_prompt is not None:
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def _fill_template(self, template: str, row: Mapping[str, Any]) -> str:
        for name in self.shown_columns:
            if row.get(name) is None:
                raise ValueError(f"'{name}' must have a value, got {_quote_value(name, row)}")
        return template.format_map(row)


def require_column(
    option: str, name: str, columns: tuple[str, ...], owner: str = "the data set"
) -> None:
    """Refuse an option that names a missing column.

    Args:
        owner: What has the columns, for the message.

    Raises:
        ConfigError: The column is missing; the message lists the columns.
    """
    if name in columns:
        return
    hint = did_you_mean(name, columns) or f"set {option} to one of them"
    if len(columns) == 1 and any(separator in columns[0] for separator in ";\t|"):
        hint = "columns of a CSV file must be separated by commas"
    raise ConfigError(
        f"{option} names the column '{name}', but {owner} has {', '.join(columns)}; {hint}"
    )


def _read_messages(column: str, row: Mapping[str, Any]) -> list[Message]:
    prompt = row.get(column)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        for number, message in enumerate(prompt):
            if extra_name := find_extra_field(message):
                raise ValueError(f"'{column}': {format_extra_field_error(extra_name, number)}")
        return [{"role": message["role"], "content": message["content"]} for message in prompt]
    raise ValueError(
        f"'{column}' must be text or a list of messages, each with a role out of "
        f"{', '.join(_ROLES)} and a text as content, got {_quote_value(column, row)}"
    )


def _refuse_functions(row: Mapping[str, Any]) -> None:
    """Refuse a row that offers functions, which chat templates list in front of the prompt."""
    functions = row.get(_FUNCTIONS_COLUMN)
    if isinstance(functions, list) and any(
        isinstance(function, dict) and "function" in function for function in functions
    ):
        raise ValueError(
            f"'{_FUNCTIONS_COLUMN}' lists functions, which a prompt cannot show; describe them in "
            "the system message and remove the column"
        )


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in _ROLES
        and isinstance(value.get("content"), str)
    )


def _quote_value(column: str, row: Mapping[str, Any]) -> str:
    if column not in row:
        return f"no '{column}' (the row has {', '.join(map(str, row)) or 'no columns'})"
    return f"{row[column]!r:.80}"

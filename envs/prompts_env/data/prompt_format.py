"""How a row becomes what a policy is shown."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludus.env import Message
from ludus.proto.errors import ConfigError, did_you_mean

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """The column that is shown, or a template over several.

    Raises:
        ConfigError: the template cannot be read.
    """

    column: str = "prompt"
    """Text, or a list of messages, {"role", "content"}."""
    template: str | None = None
    """In place of the column: text with {names of columns}."""
    system_prompt: str | None = None
    """A message of role system before all others."""

    def __post_init__(self) -> None:
        _ = self.needed

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that it shows."""
        if self.template is None:
            return (self.column,)
        try:
            parts = [name for _, name, _, _ in string.Formatter().parse(self.template)]
        except ValueError as error:
            raise ConfigError(
                f"template = {self.template!r}: {error}; a brace that is meant is written twice"
            ) from None
        names = [name for name in parts if name is not None]
        odd = [name for name in names if not name or any(sign in name for sign in ".[]")]
        if odd or not names:
            got = repr(odd[0]) if odd else "none"
            raise ConfigError(
                f"template = {self.template!r}: expected names of columns in braces, such as "
                f"{{question}}, got {got}"
            )
        return tuple(dict.fromkeys(names))

    def check_columns(self, columns: tuple[str, ...]) -> None:
        """Refuse a data set that lacks a column which is shown.

        Raises:
            ConfigError: it lacks one; the message names those that it has.
        """
        field = "prompt" if self.template is None else "template"
        for name in self.needed:
            require_column(field, name, columns)

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """What is shown of a row.

        Raises:
            ValueError: a column that is shown is missing or of another type.
        """
        shown = _as_messages(self.column, row) if self.template is None else self._filled(row)
        if self.system_prompt is not None:
            return [{"role": "system", "content": self.system_prompt}, *shown]
        return shown

    def _filled(self, row: Mapping[str, Any]) -> list[Message]:
        assert self.template is not None
        for name in self.needed:
            if row.get(name) is None:
                raise ValueError(f"expected '{name}' to be filled, got {_seen(name, row)}")
        return [{"role": "user", "content": self.template.format_map(row)}]


def require_column(option: str, name: str, columns: tuple[str, ...]) -> None:
    """Refuse an option that names a column which is not there.

    Raises:
        ConfigError: with the columns that there are.
    """
    if name in columns:
        return
    hint = did_you_mean(name, columns)
    raise ConfigError(
        f"{option} names the column '{name}', and the data set has {', '.join(columns)}"
        + (f"; {hint}" if hint else f"; set {option} to one of them")
    )


def _as_messages(column: str, row: Mapping[str, Any]) -> list[Message]:
    value = row.get(column)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return [{"role": one["role"], "content": one["content"]} for one in value]
    raise ValueError(
        f"expected '{column}' to be text or a list of messages, each with a role out of "
        f"{', '.join(_ROLES)} and a content of text, got {_seen(column, row)}"
    )


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in _ROLES
        and isinstance(value.get("content"), str)
    )


def _seen(column: str, row: Mapping[str, Any]) -> str:
    if column not in row:
        return f"no '{column}' (it has {', '.join(map(str, row)) or 'nothing'})"
    return f"{row[column]!r:.80}"

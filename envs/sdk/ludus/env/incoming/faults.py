"""Rendering of pydantic's faults, which are counted first. Rendering each costs microseconds."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

MAX_FAULTS = 1000
"""Maximum number of faults that are rendered; more are only counted."""
MAX_REPEATED_BYTES = 65_536
"""Size of JSON above which replies do not repeat the rejected input."""
_MAX_SHOWN_CHARS = 200


def list_faults(
    error: ValidationError, *, with_input: bool = True, with_documentation: bool = False
) -> list[dict[str, Any]]:
    """Return the faults in pydantic's form, or one fault with their number if there are too many.

    Args:
        with_input: include the rejected values.
        with_documentation: include the violated limits and the addresses of explanations.
    """
    num_faults = error.error_count()
    if num_faults > MAX_FAULTS:
        message = f"{num_faults} values or keys are invalid, too many to list"
        return [{"type": "too_many_faults", "loc": (), "msg": message}]
    faults = error.errors(
        include_url=with_documentation, include_context=with_documentation, include_input=with_input
    )
    return [dict(fault) for fault in faults]


def shorten_input(value: Any) -> str:
    """Return a rejected value as text, of limited length."""
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARS:
        return f"{value[:_MAX_SHOWN_CHARS]!r}..."
    return shorten(repr(value))


def shorten(text: str) -> str:
    """Return the text for a message, or only its beginning if it is long."""
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."

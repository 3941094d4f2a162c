"""Messages for users about values that do not fit a pydantic model."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ludus.proto.errors import did_you_mean

_REWORDINGS = {
    "Input should be": "expected",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
"""Our words for pydantic's, by pydantic's."""


def explain(error: ValidationError, fields: Iterable[str] = ()) -> str:
    """Return one sentence per faulty field, with the value it got.

    Args:
        fields: Names of all fields, for a hint when a name is unknown.
    """
    names = list(fields)
    return "; ".join(_explain_fault(fault, names) for fault in error.errors(include_url=False))


def _explain_fault(fault: ErrorDetails, fields: list[str]) -> str:
    field = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden" and fields:
        hint = did_you_mean(field, fields) or f"expected one of {', '.join(fields)}"
        return f"unknown option '{field}'; {hint}"
    if fault["type"] == "missing":
        return f"{field} is required"
    message = fault["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    for pattern, replacement in _REWORDINGS.items():
        message = message.replace(pattern, replacement)
    got = "" if "got " in message else f", got {fault['input']!r:.80}"
    prefix = f"{field}: " if field else ""
    return f"{prefix}{message[0].lower()}{message[1:]}{got}"

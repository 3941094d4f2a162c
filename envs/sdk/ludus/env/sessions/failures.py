"""Whatever is raised, as the EnvError that the caller of a session is told."""

from __future__ import annotations

import logging
from typing import TypeGuard

from ludus.proto.errors import EnvError, ErrorCode, ExecutionError, message_of

_log = logging.getLogger(__name__)


def failure(
    what: str,
    error: BaseException,
    code: ErrorCode = ErrorCode.EXECUTION_ERROR,
    *,
    more: str = "",
) -> ExecutionError:
    """The error that stands for what foreign code has raised, between `what` and `more`."""
    told = ExecutionError(f"{what}{type(error).__name__}: {message_of(error)}{more}", code)
    told.__cause__ = error
    return told


def as_env_error(error: Exception) -> EnvError:
    """The error itself, or one that stands for a fault of our own, which is logged.

    For the wires: whatever one call meets, the others on its connection are answered.
    """
    if is_whole(error):
        return error
    _log.error("a call could not be answered", exc_info=error)
    return failure("the call failed with ", error)


def is_whole(error: BaseException) -> TypeGuard[EnvError]:
    """True for an EnvError; a foreign subclass may never have called its base class."""
    if not isinstance(error, EnvError):
        return False
    has_text = isinstance(getattr(error, "message", None), str)
    return has_text and isinstance(getattr(error, "code", None), ErrorCode)

"""Warnings for the user, in the log and on standard error."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger(__name__)


def warn_user(message: str) -> None:
    """Log a warning and print it on standard error, where `ludus` shows it to the user."""
    _log.warning("%s", message)
    sys.stderr.write(f"warning: {message}\n")

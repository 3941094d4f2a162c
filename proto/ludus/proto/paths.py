"""Paths that users write, on command lines and in configurations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator


def parse_path(text: str | os.PathLike[str]) -> Path:
    """Return a path whose leading `~` is replaced by the home directory.

    Shells expand `~` only at the start of a word, so not in `--output=~/model`.
    """
    return Path(os.path.expanduser(text))


def expand_home(value: Any) -> Any:
    """Return a path, or a sequence of paths, with expanded `~`; other values are unchanged."""
    if isinstance(value, Path):
        return parse_path(value)
    return tuple(map(expand_home, value)) if isinstance(value, tuple) else value


PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""Path as text, with a leading `~` for the home directory."""

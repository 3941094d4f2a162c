"""Paths that users write, on command lines and in configurations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from ludus.proto.errors import did_you_mean


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


def describe_place(path: str | os.PathLike[str]) -> str:
    """Return a clause with the folder at which a relative path starts; "" for other paths."""
    if parse_path(path).is_absolute():
        return ""
    try:
        return f" in the working folder '{Path.cwd()}'"
    except FileNotFoundError:
        return " in the working folder, which was removed"


def suggest_path(path: str | os.PathLike[str], alternative: str = "") -> str:
    """Return a remedy for a path that does not exist: a similar name, or the right folder.

    Args:
        alternative: another remedy, such as "give the id of a model".
    """
    expanded_path = parse_path(path)
    folder = expanded_path.parent
    names = os.listdir(folder) if folder.is_dir() else []
    hint = did_you_mean(expanded_path.name, names)
    if hint:
        return f"{hint} Otherwise {alternative}" if alternative else hint
    remedies = ["correct the path"]
    if not expanded_path.is_absolute():
        remedies.append("run the command in the folder at which it starts")
    return ", or ".join([*remedies, alternative] if alternative else remedies)

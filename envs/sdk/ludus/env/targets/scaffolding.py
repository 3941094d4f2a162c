"""Writing a new environment: a working one in OpenEnv's folder shape, to be changed.

scaffold/*.tmpl --names filled in--> NAME_env/
"""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from ludus.env.targets.targets import SUFFIX
from ludus.proto.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_TEMPLATE_SUFFIX = ".tmpl"
_MAX_NAME_LENGTH = 40


def write_environment(name: str, parent: Path) -> list[Path]:
    """The files of a new environment in `parent`/NAME_env.

    Args:
        name: with or without "_env" at its end.

    Raises:
        ConfigError: it is no name for a package, or the folder exists.
    """
    name = checked_name(name)
    folder = parent / f"{name}{SUFFIX}"
    if folder.exists():
        inside = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        said = f"it holds {', '.join(inside[:8])}" if inside else "it is there already"
        raise ConfigError(
            f"expected no '{folder}' yet, but {said}; choose another name, or remove it"
        )
    title = "".join(part.capitalize() for part in name.split("_"))
    words = {"__NAME__": name, "__CLASS__": title, "__DASHED__": name.replace("_", "-")}
    written = []
    for place, template in _templates():
        path = folder / _filled(place, words).removesuffix(_TEMPLATE_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled(template.read_text(encoding="utf-8"), words), encoding="utf-8")
        written.append(path)
    return written


def checked_name(name: str) -> str:
    """The name without "_env".

    Raises:
        ConfigError: no package can be called so.
    """
    bare = name.removesuffix(SUFFIX)
    if not _NAME.fullmatch(bare) or keyword.iskeyword(bare) or len(bare) > _MAX_NAME_LENGTH:
        raise ConfigError(
            f"expected a name of lower-case words joined by underscores, like grid_maze, of at"
            f" most {_MAX_NAME_LENGTH} letters; got '{name}'"
        )
    return bare


def _templates() -> list[tuple[str, Traversable]]:
    root = files("ludus.env").joinpath("scaffold")
    return sorted(_found_in(root, ""), key=lambda pair: pair[0])


def _found_in(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in folder.iterdir():
        place = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _found_in(entry, f"{place}/")
        elif entry.name.endswith(_TEMPLATE_SUFFIX):
            found.append((place, entry))
    return found


def _filled(text: str, words: dict[str, str]) -> str:
    for token, word in words.items():
        text = text.replace(token, word)
    return text

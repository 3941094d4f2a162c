"""Templates of a new environment in OpenEnv's folder layout.

scaffold/*.tmpl --names filled in--> NAME_env/
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from ludus.env.targets.targets import SUFFIX
from ludus.proto.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_TEMPLATES = Path(__file__).parents[1] / "scaffold"
_TEMPLATE_SUFFIX = ".tmpl"
_MAX_NAME_CHARS = 40


def write_environment(name: str, parent: Path) -> list[Path]:
    """Write the files of a new environment to `parent`/NAME_env and return their paths.

    Raises:
        ConfigError: the name is not valid, or the folder exists.
    """
    name = _validate_name(name)
    folder = parent / f"{name}{SUFFIX}"
    if folder.exists():
        content = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        state = f"contains {', '.join(content[:8])}" if content else "exists already"
        raise ConfigError(f"'{folder}' {state}; choose another name, or remove it")
    title = "".join(part.capitalize() for part in name.split("_"))
    replacements = {"__NAME__": name, "__CLASS__": title, "__DASHED__": name.replace("_", "-")}
    paths = []
    for template in sorted(_TEMPLATES.rglob(f"*{_TEMPLATE_SUFFIX}")):
        relative_path = str(template.relative_to(_TEMPLATES))
        path = folder / _fill_in(relative_path, replacements).removesuffix(_TEMPLATE_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _fill_in(template.read_text(encoding="utf-8"), replacements)
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _validate_name(name: str) -> str:
    bare = name.removesuffix(SUFFIX)
    if not _NAME.fullmatch(bare) or keyword.iskeyword(bare) or len(bare) > _MAX_NAME_CHARS:
        raise ConfigError(
            f"'{name}' is not a valid name: use lower-case words joined by underscores, like"
            f" grid_maze, with at most {_MAX_NAME_CHARS} characters"
        )
    return bare


def _fill_in(text: str, replacements: dict[str, str]) -> str:
    for token, replacement in replacements.items():
        text = text.replace(token, replacement)
    return text

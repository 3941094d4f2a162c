"""Templates of a new environment in OpenEnv's folder layout.

scaffold/*.tmpl --parts selected, names filled in--> NAME_env/
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from ludus.env.catalogue.packages import PACKAGE_SUFFIX
from ludus.proto.errors import ConfigError

_NAME_PATTERN = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_TEMPLATES = Path(__file__).parents[1] / "scaffold"
_TEMPLATE_SUFFIX = ".tmpl"
_MAX_NAME_CHARS = 40


def write_environment(name: str, parent: Path, *, has_tools: bool = False) -> list[Path]:
    """Write the files of a new environment to `parent`/NAME_env and return their paths.

    Args:
        has_tools: True for an environment with two tools, one of which ends the episode.

    Raises:
        ConfigError: the name is not valid, or the folder exists.
    """
    name = _validate_name(name)
    folder = parent / f"{name}{PACKAGE_SUFFIX}"
    if folder.exists():
        file_names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        problem = f"contains {', '.join(file_names[:8])}" if file_names else "exists already"
        raise ConfigError(f"'{folder}' {problem}; choose another name, or remove it")
    class_name = "".join(word.capitalize() for word in name.split("_"))
    replacements = {"__NAME__": name, "__CLASS__": class_name, "__DASHED__": name.replace("_", "-")}
    paths = []
    for template in sorted(_TEMPLATES.rglob(f"*{_TEMPLATE_SUFFIX}")):
        relative_path = str(template.relative_to(_TEMPLATES))
        path = folder / _fill_in(relative_path, replacements).removesuffix(_TEMPLATE_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _select_lines(template.read_text(encoding="utf-8"), has_tools=has_tools)
        file_content = _fill_in(text, replacements)
        path.write_text(file_content, encoding="utf-8")
        paths.append(path)
    return paths


def _validate_name(name: str) -> str:
    bare_name = name.removesuffix(PACKAGE_SUFFIX)
    if (
        not _NAME_PATTERN.fullmatch(bare_name)
        or keyword.iskeyword(bare_name)
        or len(bare_name) > _MAX_NAME_CHARS
    ):
        raise ConfigError(
            f"'{name}' is not a valid name: use lower-case words joined by underscores, like"
            f" grid_maze, with at most {_MAX_NAME_CHARS} characters"
        )
    return bare_name


def _select_lines(template: str, *, has_tools: bool) -> str:
    """Return the lines of a template without the parts that do not apply.

    A part starts with a line `#if tools`, may have another part after `#else`, and ends with
    `#end`.
    """
    lines: list[str] = []
    is_selected = True
    for line in template.splitlines(keepends=True):
        match line.rstrip("\n"):
            case "#if tools":
                is_selected = has_tools
            case "#else":
                is_selected = not has_tools
            case "#end":
                is_selected = True
            case _ if is_selected:
                lines.append(line)
    return "".join(lines)


def _fill_in(template: str, replacements: dict[str, str]) -> str:
    for placeholder, replacement in replacements.items():
        template = template.replace(placeholder, replacement)
    return template

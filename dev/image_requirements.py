"""Prints what packages of this repository require of others, for the Dockerfiles.

The layer that installs it is made anew when a pyproject.toml changes, not with every line of code.

    python dev/image_requirements.py [--without NAME]... [--extra NAME]... FOLDER...
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(folders: list[Path], without: set[str], extras: Iterable[str] = ()) -> list[str]:
    """The dependencies of the packages in `folders`, but for each other's and those left out.

    With what their optional parts in `extras` need, where they have such parts.
    """
    projects = [tomllib.loads((folder / "pyproject.toml").read_text()) for folder in folders]
    left_out = without | {project["project"]["name"] for project in projects}
    wanted = {line for project in projects for line in project["project"]["dependencies"]}
    optional = [project["project"].get("optional-dependencies", {}) for project in projects]
    wanted |= {line for parts in optional for extra in extras for line in parts.get(extra, ())}
    return sorted(line for line in wanted if _name(line) not in left_out)


def _name(requirement: str) -> str:
    match = _NAME.match(requirement)
    return match.group() if match else requirement


def main() -> None:
    """One requirement a line, as pip reads them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--extra", action="append", default=[])
    arguments = parser.parse_args()
    lines = requirements(arguments.folders, set(arguments.without), arguments.extra)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()

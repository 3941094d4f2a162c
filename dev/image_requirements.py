"""Print the third-party requirements of the repository's packages, for the Dockerfiles.

The layer that installs them is rebuilt only when a pyproject.toml changes.

    python dev/image_requirements.py [--without NAME]... [--extra NAME]... FOLDER...
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

_NAME_END = re.compile(r"[^A-Za-z0-9._-]")


def list_requirements(
    folders: list[Path], excluded_names: set[str], extras: Iterable[str] = ()
) -> list[str]:
    """Return the requirements of the packages in `folders`, sorted.

    The packages themselves and `excluded_names` are left out. Optional dependencies in `extras` are
    included.
    """
    projects = [tomllib.loads((folder / "pyproject.toml").read_text()) for folder in folders]
    excluded_names = excluded_names | {project["project"]["name"] for project in projects}
    lines = {line for project in projects for line in project["project"]["dependencies"]}
    groups = [project["project"].get("optional-dependencies", {}) for project in projects]
    lines |= {line for group in groups for extra in extras for line in group.get(extra, ())}
    return sorted(line for line in lines if _NAME_END.split(line)[0] not in excluded_names)


def main() -> None:
    """Print one requirement per line, in pip's format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--extra", action="append", default=[])
    arguments = parser.parse_args()
    lines = list_requirements(arguments.folders, set(arguments.without), arguments.extra)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()

"""Print the workspace's members, one folder per line, in the order in which they can be built.

    python dev/members.py

The root `pyproject.toml` lists them. The root itself, the package `ludus`, comes last.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def list_members() -> list[Path]:
    """Return the folder of each member, relative to the root."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["uv"]["workspace"]["members"]
    folders = [folder for pattern in patterns for folder in sorted(ROOT.glob(pattern))]
    members = [folder for folder in folders if (folder / "pyproject.toml").is_file()]
    return [*(folder.relative_to(ROOT) for folder in members), Path()]


if __name__ == "__main__":
    sys.stdout.write("".join(f"./{folder}\n" for folder in list_members()))

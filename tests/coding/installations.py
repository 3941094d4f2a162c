"""Installations of coding_env in new virtual environments, without access to the checkout's root.

The third-party packages are those of the running interpreter.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = {
    "ludus.proto": ROOT / "proto/ludus/proto",
    "ludus.env": ROOT / "envs/sdk/ludus/env",
    "coding_env": ROOT / "envs/coding_env",
}
_EDITABLE_FINDER = """
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location

MAPPING = {mapping!r}

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "ludus":
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = []
            return spec
        if name in MAPPING:
            return spec_from_file_location(name, MAPPING[name] + "/__init__.py")

sys.meta_path.append(Finder)
"""
LAYOUTS = ("wheel", "image", "editable")


def install(layout: str, folder: Path) -> Path:
    """Install the packages as a layout does, and return the interpreter.

    Args:
        layout: "wheel" copies the packages into the virtual environment, "image" into a folder that
            a .pth file names, and "editable" installs a finder of the checkout's packages.
    """
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True
    )
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (site_packages / "locked.pth").write_text(sysconfig.get_path("purelib"))
    match layout:
        case "wheel":
            _copy_packages(site_packages)
        case "image":
            _copy_packages(folder / "opt")
            (site_packages / "ludus.pth").write_text(str(folder / "opt"))
        case "editable":
            mapping = {name: str(path) for name, path in _FOLDERS.items()}
            (site_packages / "finder.py").write_text(_EDITABLE_FINDER.format(mapping=mapping))
            (site_packages / "finder.pth").write_text("import finder")
    return folder / "venv/bin/python"


def _copy_packages(folder: Path) -> None:
    for name, path in _FOLDERS.items():
        shutil.copytree(
            path,
            folder / name.replace(".", "/"),
            ignore=shutil.ignore_patterns("__pycache__", "tests"),
        )

"""Virtual environments that hold OpenEnv's own package beside what our SDK requires.

Ours is found through PYTHONPATH, as in an editable installation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "proto", ROOT / "envs" / "sdk", ROOT / "tests" / "env")
REQUIREMENT_OF = {
    "0.1.1": "openenv-core==0.1.1",
    "0.2.1": "openenv-core==0.2.1",
    "0.3.0": "openenv-core==0.3.0",
    "0.10.0": "openenv==0.10.0",
}


def stock_python(version: str) -> Path:
    """The interpreter beside an OpenEnv of that version; its folder is made once, then kept."""
    folder = ROOT / ".cache" / f"stock-sdk-openenv-{version}"
    python, marker = folder / "bin" / "python", folder / "complete"
    if not marker.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        requirements = [REQUIREMENT_OF[version], *_sdk_requirements()]
        subprocess.run([*install, *requirements], check=True, timeout=500)
        marker.touch()
    return python


def run_beside_stock(version: str, script: str, *arguments: str) -> subprocess.CompletedProcess:
    """A finished `python SCRIPT ARGUMENTS` in that virtual environment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    return subprocess.run(
        [stock_python(version), script, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=environment,
        cwd=Path(__file__).parent,
    )


def _sdk_requirements() -> list[str]:
    found = []
    for folder in (ROOT / "proto", ROOT / "envs" / "sdk"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        found += [name for name in project["dependencies"] if not name.startswith("ludus-")]
    return found


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        stock_python(wanted)

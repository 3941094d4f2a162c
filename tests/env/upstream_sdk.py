"""Virtual environments with a version of OpenEnv and the requirements of the Ludus SDK.

The Ludus SDK is imported through PYTHONPATH, as in an editable installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from upstream_environment import build_virtual_environment

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "proto", ROOT / "envs" / "sdk", ROOT / "tests" / "env")
REQUIREMENTS_BY_VERSION = {
    "0.1.1": "openenv-core==0.1.1",
    "0.2.1": "openenv-core==0.2.1",
    "0.3.0": "openenv-core==0.3.0",
    "0.10.0": "openenv==0.10.0",
}


def get_upstream_python(version: str) -> Path:
    """Return the interpreter of the virtual environment, which is created if it is missing."""
    requirements = [REQUIREMENTS_BY_VERSION[version], *_read_sdk_requirements()]
    return build_virtual_environment(f"upstream-sdk-openenv-{version}", requirements)


def run_with_upstream(version: str, script: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run a script in the virtual environment; return the completed process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    return subprocess.run(
        [get_upstream_python(version), script, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment,
        cwd=Path(__file__).parent,
    )


def _read_sdk_requirements() -> list[str]:
    requirements = []
    for folder in (ROOT / "proto", ROOT / "envs" / "sdk"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        requirements += [name for name in project["dependencies"] if not name.startswith("ludus-")]
    return requirements


if __name__ == "__main__":
    for version in sys.argv[1:]:
        get_upstream_python(version)

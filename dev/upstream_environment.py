"""Virtual environments with somebody else's published package, for measuring and conformance.

    python_of("openenv==0.10.0") --> .cache/upstream-openenv-0.10.0/bin/python

OpenEnv's own servers and clients bring libraries that ours must not depend on, so they run in
processes of their own. An environment is built once and kept. Whoever needs one that another
process is building waits for it. As a program:

    python dev/upstream_environment.py openenv==0.10.0 [--extra open_spiel==2.0.2 ...]
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

from images import pip_configuration

CACHE = Path(__file__).parents[1] / ".cache"
INSTALL_TIMEOUT_S = 600
_PINNED = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9._!+-]+")


class UpstreamEnvironmentError(RuntimeError):
    """The virtual environment cannot be built; the message says why."""


def python_of(requirement: str, *, extra: Sequence[str] = ()) -> Path:
    """The interpreter of a virtual environment that holds the requirement.

    Args:
        requirement: with its version, for example "openenv==0.10.0".
        extra: requirements beside it, with their versions.

    Raises:
        UpstreamEnvironmentError: a requirement has no version, or cannot be installed.
    """
    requirements = [requirement, *extra]
    for one in requirements:
        if not _PINNED.fullmatch(one):
            raise UpstreamEnvironmentError(
                f"expected a requirement with its version, like openenv==0.10.0, got {one!r}"
            )
    name = "+".join(one.replace("==", "-") for one in requirements)
    return python_in(f"upstream-{name}", requirements)


def python_in(name: str, requirements: Sequence[str]) -> Path:
    """The interpreter of the virtual environment of that name, which holds the requirements.

    Raises:
        UpstreamEnvironmentError: they cannot be installed.
    """
    folder = CACHE / name
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if complete.exists():  # written last: what a killed build left behind has none
        return python
    CACHE.mkdir(exist_ok=True)
    with _locked(CACHE / f"{folder.name}.lock"):
        if not complete.exists():
            _build(folder, python, requirements)
            complete.touch()
    return python


def _build(folder: Path, python: Path, requirements: Sequence[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False)
    # uv takes a tenth of pip's time; where it fails, pip has the last word.
    if _install("uv", "pip", "install", "--python", python, *_indexes(), *requirements):
        said = _install("pip", "--python", python, "install", *requirements)
        if said is not None:
            raise UpstreamEnvironmentError(
                f"expected pip to install {' '.join(requirements)} into {folder}, it failed: {said}"
            )


def _indexes() -> list[str]:
    """Where pip looks for packages on this machine, as uv's options: it reads no file of pip's."""
    listed = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    configuration = pip_configuration(said)
    options = ["--index-strategy=unsafe-best-match"]  # pip's
    for option in ("index-url", "extra-index-url", "find-links"):
        options += [f"--{option}={place}" for place in configuration.get(option, "").split()]
    return options


def _install(*command: str | Path) -> str | None:
    """What an installer says that could not install; None from one that could."""
    try:
        ended = subprocess.run(
            [sys.executable, "-m", *command, "--quiet"],
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
            env=os.environ | {"UV_CACHE_DIR": str(CACHE / "uv")},
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {INSTALL_TIMEOUT_S} s; check the connection to the index"
    return None if ended.returncode == 0 else ended.stderr.strip()[-2000:]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The system frees the lock of a process that dies.
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Writes the interpreter's path; ends with code 2 and one line where it cannot be built."""
    parser = argparse.ArgumentParser(description="Builds a virtual environment once.")
    parser.add_argument("requirement", help="for example openenv==0.10.0")
    parser.add_argument("--extra", nargs="*", default=[], help="requirements beside it")
    arguments = parser.parse_args()
    try:
        python = python_of(arguments.requirement, extra=arguments.extra)
    except UpstreamEnvironmentError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    sys.stdout.write(f"{python}\n")


if __name__ == "__main__":
    main()

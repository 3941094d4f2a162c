"""Virtual environments with third-party packages, for benchmarks and conformance tests.

    install_upstream("openenv==0.10.0") --> .cache/upstream-openenv-0.10.0/bin/python

OpenEnv's servers and clients need libraries that Ludus must not depend on, so they run in separate
processes. An environment is built once and kept. A process waits while another process builds the
same environment. Command line:

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

from images import parse_pip_configuration

CACHE = Path(__file__).parents[1] / ".cache"
INSTALL_TIMEOUT_S = 600
_PINNED_PATTERN = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9._!+-]+")


class UpstreamEnvironmentError(RuntimeError):
    """The virtual environment cannot be built; the message contains the reason."""


def install_upstream(requirement: str, *, extra: Sequence[str] = ()) -> Path:
    """Return the interpreter of a virtual environment with the requirement.

    Args:
        requirement: requirement with a version, for example "openenv==0.10.0".
        extra: further requirements with versions.

    Raises:
        UpstreamEnvironmentError: a requirement has no version, or cannot be installed.
    """
    requirements = [requirement, *extra]
    for specifier in requirements:
        if not _PINNED_PATTERN.fullmatch(specifier):
            raise UpstreamEnvironmentError(
                f"a requirement must have a version, such as openenv==0.10.0, got {specifier!r}"
            )
    name = "+".join(specifier.replace("==", "-") for specifier in requirements)
    return build_virtual_environment(f"upstream-{name}", requirements)


def build_virtual_environment(name: str, requirements: Sequence[str]) -> Path:
    """Build a virtual environment if it does not exist, and return its interpreter.

    Raises:
        UpstreamEnvironmentError: the requirements cannot be installed.
    """
    folder = CACHE / name
    python = folder / "bin" / "python"
    completion_file = folder / "complete"
    if completion_file.exists():  # written last, so that an incomplete build has no such file
        return python
    CACHE.mkdir(exist_ok=True)
    with hold_lock(CACHE / f"{folder.name}.lock"):
        if not completion_file.exists():
            _build_environment(folder, python, requirements)
            completion_file.touch()
    return python


def download_source(requirement: str) -> Path:
    """Return the source package of a requirement with a version, downloaded once.

    Raises:
        UpstreamEnvironmentError: the package cannot be downloaded.
    """
    folder = CACHE / f"source-{requirement.replace('==', '-')}"
    completion_file = folder / "complete"
    CACHE.mkdir(exist_ok=True)
    with hold_lock(CACHE / f"{folder.name}.lock"):
        if not completion_file.exists():
            options = ["--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
            command = [sys.executable, "-m", "pip", "download", "-q", *options, requirement]
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
            )
            if process.returncode != 0:
                raise UpstreamEnvironmentError(
                    f"{requirement} cannot be downloaded: {process.stderr[-1000:]}"
                )
            completion_file.touch()
    return next(folder.glob("*.tar.gz"))


def _build_environment(folder: Path, python: Path, requirements: Sequence[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False)
    # uv is about ten times faster than pip; if uv fails, pip tries again.
    if _install("uv", "pip", "install", "--python", python, *_list_index_options(), *requirements):
        error = _install("pip", "--python", python, "install", *requirements)
        if error is not None:
            raise UpstreamEnvironmentError(
                f"pip cannot install {' '.join(requirements)} in {folder}: {error}"
            )


def _list_index_options() -> list[str]:
    """Return pip's indexes as options of uv, which does not read pip's configuration."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    configuration = parse_pip_configuration(listing)
    options = ["--index-strategy=unsafe-best-match"]  # as in pip
    for option in ("index-url", "extra-index-url", "find-links"):
        options += [f"--{option}={value}" for value in configuration.get(option, "").split()]
    return options


def _install(*command: str | Path) -> str | None:
    """Run an installer and return its error message, or None if it succeeded."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", *command, "--quiet"],
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
            env=os.environ | {"UV_CACHE_DIR": str(CACHE / "uv")},
        )
    except subprocess.TimeoutExpired:
        return (
            f"installing took longer than {INSTALL_TIMEOUT_S} s; check the connection to the index"
        )
    return None if process.returncode == 0 else process.stderr.strip()[-2000:]


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file. The system releases the lock of a process that dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Print the interpreter's path; exit with code 2 and a message if the build fails."""
    parser = argparse.ArgumentParser(description="Build a virtual environment once.")
    parser.add_argument("requirement", help="for example openenv==0.10.0")
    parser.add_argument("--extra", nargs="*", default=[], help="further requirements")
    arguments = parser.parse_args()
    try:
        python = install_upstream(arguments.requirement, extra=arguments.extra)
    except UpstreamEnvironmentError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    sys.stdout.write(f"{python}\n")


if __name__ == "__main__":
    main()

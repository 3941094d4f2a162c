"""Where promtool and prometheus are: on the machine, or out of Debian's package.

    binary("promtool") --> $PROMTOOL_BINARY, or PATH, or .cache/prometheus/usr/bin/promtool

The package is unpacked, not installed: nothing starts, and no right beyond one's own is needed.
As a program: python dev/prometheus_tools.py promtool
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".cache"
DOWNLOAD_TIMEOUT_S = 180


class PrometheusToolsError(RuntimeError):
    """The program cannot be had here; the message says why, and the way out."""


def binary(name: str) -> Path:
    """The program `promtool` or `prometheus`.

    Raises:
        PrometheusToolsError: it is not on this machine, and cannot be fetched.
    """
    variable = f"{name.upper()}_BINARY"
    given = os.environ.get(variable) or shutil.which(name)
    if given:
        return Path(given)
    folder = CACHE / "prometheus"
    CACHE.mkdir(exist_ok=True)
    with _locked(CACHE / "prometheus.lock"):
        if not folder.exists():
            _unpack_package(folder, variable)
    return folder / "usr" / "bin" / name


def _unpack_package(folder: Path, variable: str) -> None:
    aside = folder.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        _run(["apt-get", "download", "prometheus"], aside)
        (package,) = aside.glob("prometheus_*.deb")
        _run(["dpkg", "-x", package.name, "."], aside)
        package.unlink()
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise PrometheusToolsError(
            f"no Prometheus here, and Debian's package cannot be had: {said.strip()}; install "
            f"Prometheus, or set {variable} to its program"
        ) from error
    aside.rename(folder)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Whoever comes second waits for the first, and finds what it made."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{binary(sys.argv[1])}\n")
    except PrometheusToolsError as error:
        sys.exit(f"error: {error}")

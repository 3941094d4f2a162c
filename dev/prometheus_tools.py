"""Paths of promtool and prometheus, from this machine or from Debian's package.

    find_binary("promtool") --> $PROMTOOL_BINARY, or PATH, or .cache/prometheus/usr/bin/promtool

The package is unpacked and not installed, so no service starts and no root is needed.
Command line: python dev/prometheus_tools.py promtool
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
    """The program is not available; the message contains the reason and the remedy."""


def find_binary(name: str) -> Path:
    """Return the path of `promtool` or `prometheus`.

    Raises:
        PrometheusToolsError: the program is not on this machine and cannot be downloaded.
    """
    variable = f"{name.upper()}_BINARY"
    path = os.environ.get(variable) or shutil.which(name)
    if path:
        return Path(path)
    folder = CACHE / "prometheus"
    CACHE.mkdir(exist_ok=True)
    with _lock(CACHE / "prometheus.lock"):
        if not folder.exists():
            _unpack_package(folder, variable)
    return folder / "usr" / "bin" / name


def _unpack_package(folder: Path, variable: str) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _run(["apt-get", "download", "prometheus"], partial)
        (package,) = partial.glob("prometheus_*.deb")
        _run(["dpkg", "-x", package.name, "."], partial)
        package.unlink()
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise PrometheusToolsError(
            f"Prometheus is not installed, and Debian's package cannot be downloaded: "
            f"{reason.strip()}; install Prometheus, or set {variable} to its path"
        ) from error
    partial.rename(folder)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
    )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock, so that only one process unpacks the package."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{find_binary(sys.argv[1])}\n")
    except PrometheusToolsError as error:
        sys.exit(f"error: {error}")

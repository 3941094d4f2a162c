"""Paths of promtool and prometheus, from this machine or from Debian's package.

    find_binary("promtool") --> $PROMTOOL_BINARY, or PATH, or .cache/prometheus/usr/bin/promtool

The package is unpacked and not installed, so no service starts and no root is needed.
Command line: python dev/prometheus_tools.py promtool
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from upstream_environment import hold_lock

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
    with hold_lock(CACHE / "prometheus.lock"):
        if not folder.exists():
            _unpack_package(folder, variable)
    return folder / "usr" / "bin" / name


def _unpack_package(folder: Path, variable: str) -> None:
    partial_folder = folder.with_suffix(".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir()
    try:
        _run(["apt-get", "download", "prometheus"], partial_folder)
        (package,) = partial_folder.glob("prometheus_*.deb")
        _run(["dpkg", "-x", package.name, "."], partial_folder)
        package.unlink()
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise PrometheusToolsError(
            f"Prometheus is not installed, and Debian's package cannot be downloaded: "
            f"{reason.strip()}; install Prometheus, or set {variable} to its path"
        ) from error
    partial_folder.rename(folder)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
    )


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{find_binary(sys.argv[1])}\n")
    except PrometheusToolsError as error:
        sys.exit(f"error: {error}")

"""promtool for tests, which skip aloud where it cannot be had."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest
from prometheus_tools import PrometheusToolsError, find_binary


@functools.cache
def _found(name: str) -> Path | str:
    try:
        return find_binary(name)
    except PrometheusToolsError as error:
        return str(error)


def program(name: str) -> Path:
    """The program; skips the test where it cannot be had."""
    found = _found(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def promtool(*arguments: object) -> str:
    """What promtool says; fails the test where it finds fault."""
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout

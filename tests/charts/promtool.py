"""Functions that run promtool, or skip a test if promtool is not available."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest
from prometheus_tools import PrometheusToolsError, find_binary


@functools.cache
def _locate(name: str) -> Path | str:
    try:
        return find_binary(name)
    except PrometheusToolsError as error:
        return str(error)


def find_program(name: str) -> Path:
    """Return the path of the program, or skip the test if it is not available."""
    path_or_reason = _locate(name)
    if isinstance(path_or_reason, str):
        pytest.skip(path_or_reason)
    return path_or_reason


def run_promtool(*arguments: object) -> str:
    """Run promtool and return the output; fail the test if promtool reports an error."""
    command = [find_program("promtool"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout

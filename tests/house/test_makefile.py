"""The virtual environment that the targets of the Makefile use."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("is_argument", [True, False], ids=["argument", "environment"])
def test_targets_ignore_a_given_virtual_environment(is_argument: bool) -> None:
    command = ["make", "--dry-run", "lint", "bench", *(["VENV=other"] if is_argument else [])]
    variables = {**os.environ, "VENV": "other"}
    recipes = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    ).stdout
    assert "VENV=.venv PYTHON=" in recipes
    assert ".venv/bin/python bench/generators.py" in recipes
    assert "other" not in recipes

"""Every file that a docstring or a comment names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("bench", "dev", "envs", "examples", "proto", "services", "tests", "trainer")
_PATH_PATTERN = re.compile(
    r"(?<![\w/.{}$-])((?:bench|charts|dev|docs|examples|tests|envs/sdk/ludus|proto/ludus"
    r"|services/ludus|trainer/ludus)/[\w./-]+\.(?:ipynb|json|jsonl|md|py|sh|toml|tpl))\b"
)
GENERATED_FILES = {"bench/results/transcripts.json", "tests/charts/crds/KIND.json"}
"""Files that are written by the program that names them."""


@pytest.mark.parametrize("part", PARTS)
def test_named_files_exist(part: str) -> None:
    missing_files = {
        f"{path.relative_to(ROOT)} names {name}"
        for path in (ROOT / part).rglob("*.py")
        # These names belong to a folder that the test creates.
        if path.name != "test_cli_init.py" and ".venv" not in path.parts
        for name in _PATH_PATTERN.findall(path.read_text(encoding="utf-8"))
        if name not in GENERATED_FILES and not (ROOT / name).exists()
    }
    assert not missing_files

"""Existence of the files that docstrings, comments and pages name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("bench", "dev", "docs", "envs", "examples", "proto", "services", "tests", "trainer")
_PATH_PATTERN = re.compile(
    r"(?<![\w/.{}$-])((?:bench|charts|dev|docs|examples|tests|envs/sdk/ludus|proto/ludus"
    r"|services/ludus|trainer/ludus)/[\w./-]+\.(?:ipynb|json|jsonl|md|py|sh|toml|tpl))\b"
)
GENERATED_FILES = {"bench/results/transcripts.json", "tests/charts/crds/KIND.json"}
"""Paths that are not in the repository because a program generates the files."""


@pytest.mark.slow
@pytest.mark.parametrize("folder_name", FOLDERS)
def test_named_files_exist(folder_name: str) -> None:
    missing_files = {
        f"{path.relative_to(ROOT)} names {name}"
        for path in (ROOT / folder_name).rglob("*")
        if path.suffix in (".py", ".md")
        # test_cli_init.py names files in a folder that its tests create.
        and path.name != "test_cli_init.py"
        and ".venv" not in path.parts
        for name in _PATH_PATTERN.findall(path.read_text(encoding="utf-8"))
        if name not in GENERATED_FILES and not (ROOT / name).exists()
    }
    assert not missing_files

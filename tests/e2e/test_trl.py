"""TRL scripts train with one changed import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.trl_program import NUM_ROWS, SEEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def train(folder: Path, form: str) -> dict[str, Any]:
    """Run the program; return the results that it prints."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.e2e.trl_program", str(folder), form]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.usefixtures("shared_ray")
def test_both_kinds_of_rollout_function_train_alike_and_use_each_row_once(tmp_path: Path) -> None:
    over_http, by_call = (train(tmp_path / form, form) for form in ("http", "call"))
    assert over_http == by_call, "the same episodes, and so the same course"
    assert over_http["global_step"] == NUM_ROWS * 4 // 16
    assert (over_http["epoch"], over_http["model"]) == (1.0, True)
    assert len(over_http["rewards"]) == over_http["global_step"]
    assert over_http["answers"] > 0
    rewarded = list(map(int, (tmp_path / "http" / SEEN).read_text().split()))
    # Later rows were played ahead of the last step or in evaluations.
    trained_on = Counter(rewarded[: NUM_ROWS * 4])
    assert trained_on == dict.fromkeys(range(NUM_ROWS), 4)

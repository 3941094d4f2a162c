"""TRL scripts train with one changed import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.trl_program import NUM_ROWS, REWARDED_ROWS_FILE

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]


def run_program(folder: Path, form: str) -> dict[str, Any]:
    """Run the TRL program and return the results that it prints."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.e2e.trl_program", str(folder), form]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=500)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.usefixtures("shared_ray")
def test_http_and_call_rollout_functions_match_and_use_each_row_once(tmp_path: Path) -> None:
    http_result, call_result = (run_program(tmp_path / form, form) for form in ("http", "call"))
    assert http_result == call_result, "HTTP and function calls gave different results"
    assert http_result["global_step"] == NUM_ROWS * 4 // 16
    assert (http_result["epoch"], http_result["model"]) == (1.0, True)
    assert len(http_result["rewards"]) == http_result["global_step"]
    assert http_result["answers"] > 0
    rewarded_rows = list(map(int, (tmp_path / "http" / REWARDED_ROWS_FILE).read_text().split()))
    # The remaining rows were sampled in advance or belong to evaluations.
    num_rewards_by_row = Counter(rewarded_rows[: NUM_ROWS * 4])
    assert num_rewards_by_row == dict.fromkeys(range(NUM_ROWS), 4)

"""Scripts of TRL's train here with one import line changed."""

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


def trained(folder: Path, form: str) -> dict[str, Any]:
    """What the program prints of its training."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.e2e.trl_program", str(folder), form]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.usefixtures("shared_ray")
def test_both_ways_of_a_rollout_function_train_alike_and_use_each_row_once(tmp_path: Path) -> None:
    by_port, by_call = (trained(tmp_path / form, form) for form in ("once", "repeated"))
    assert by_port == by_call, "the same episodes, and so the same course"
    assert by_port["global_step"] == NUM_ROWS * 4 // 16
    assert (by_port["epoch"], by_port["model"]) == (1.0, True)
    assert len(by_port["rewards"]) == by_port["global_step"]
    assert by_port["answers"] > 0
    rewarded = list(map(int, (tmp_path / "once" / SEEN).read_text().split()))
    # What follows is played ahead, beyond the last step, and in evaluations.
    trained_on = Counter(rewarded[: NUM_ROWS * 4])
    assert trained_on == dict.fromkeys(range(NUM_ROWS), 4)

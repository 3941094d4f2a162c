"""The commands in docs/your-environment.md create an environment and train a policy in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.proto.runs import EVAL_FILE, SUMMARY_FILE, Evaluation, Summary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("shared_ray"),
]

PAGE_PATH = Path(__file__).parents[2] / "docs" / "your-environment.md"
LUDUS_COMMAND = (sys.executable, "-c", "from ludus.services.cli.app import main; main()")
SHORT_RUN = ("--set", "training.num_steps=25", "--set", "eval.num_games=1000")
"""Overrides that shorten the run: fewer training steps and evaluation episodes."""


def run_ludus(cwd: Path, *arguments: str) -> str:
    """Run a `ludus` command and return its standard output."""
    completed = subprocess.run(
        [*LUDUS_COMMAND, *arguments],
        cwd=cwd,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    return completed.stdout


def test_policy_learns_the_environment_created_by_init(tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE_PATH.read_text("utf-8"), re.DOTALL)
    commands = [line.split()[1:] for line in block.splitlines()]
    assert commands[0] == ["env", "init", "number_guess"]
    for command in commands:
        run_ludus(tmp_path, *command, *(SHORT_RUN if command[0] == "train" else ()))

    run_folder = tmp_path / "runs" / "number_guess"
    assert (run_folder / "report.html").is_file()
    summary = Summary.model_validate_json((run_folder / SUMMARY_FILE).read_text())
    assert summary.start is not None and summary.gap_closed_ci95 is not None
    random_result, halving_result = summary.baselines["random"], summary.baselines["halving"]
    assert halving_result.win_rate == 1.0
    assert summary.start.win_rate < random_result.win_rate_ci95[1] + 0.05
    assert summary.gap_closed_ci95[0] > 0.1
    assert summary.win_rate_ci95[0] > summary.start.win_rate_ci95[1]

    greedy_evaluation = Evaluation.model_validate_json((run_folder / EVAL_FILE).read_text())
    assert greedy_evaluation.environments["number_guess"].policy.num_games == 500

"""A run that ends with an error says what was wrong, and loses no step that it can save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.errors import TrainingStalledError
from ludus.trainer.learner.step_metrics import StepMetrics
from tests.controller.simulated_run import SimulatedRun

pytestmark = pytest.mark.timeout(120)


def make_run(folder: Path, **training: Any) -> SimulatedRun:
    """A run whose only checkpoints are those of its end."""
    training = {
        "num_steps": 20,
        "groups_per_step": 4,
        "max_staleness": 1,
        "checkpoint_every_steps": 100,
    } | training
    return SimulatedRun(folder, {"training": training})


def skip_updates(run: SimulatedRun, *steps: int) -> None:
    """Let the updates of these steps be skipped."""
    train_step, in_a_row = run.learner.train_step, 0

    async def skipping(*args: Any) -> StepMetrics:
        nonlocal in_a_row
        is_skipped = run.learner.steps in steps
        in_a_row = in_a_row + 1 if is_skipped else 0
        metrics = await train_step(*args)
        return replace(metrics, num_skipped_updates=int(is_skipped), num_skipped_in_a_row=in_a_row)

    run.learner.train_step = skipping


async def test_a_few_skipped_updates_are_counted_and_end_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    skip_updates(run, 2, 3, 7)
    state = await run.go()
    assert state.step == 20
    assert [row.step for row in run.rows if row.values["num_skipped_updates"]] == [3, 4, 8]


async def test_a_run_that_takes_no_update_any_more_ends_with_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    skip_updates(run, *range(3, 20))
    with pytest.raises(TrainingStalledError, match=r"10 updates in a row .*learning_rate"):
        await run.go()
    assert run.rows[-1].step == 13

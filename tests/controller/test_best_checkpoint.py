"""The checkpoint with the best evaluation is written, kept, and replaced only by a better one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.runs import EvalReport, PolicyResult, read_metrics
from ludus.trainer.driver.loops.controller import Controller
from ludus.trainer.run.checkpoint import list_checkpoints, parse_checkpoint_step
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


def make_report(win_rate: float) -> EvalReport:
    policy = PolicyResult(
        num_games=10,
        win_rate=win_rate,
        win_rate_ci95=(0.0, 1.0),
        draw_rate=None,
        expected_return=0.0,
        expected_return_ci95=(0.0, 0.0),
    )
    return EvalReport(
        policy=policy, baselines={}, temperature=1.0, gap_closed=None, gap_closed_ci95=None
    )


def make_run(folder: Path, win_rates: Sequence[float], **settings: Any) -> SimulatedRun:
    """Return a run that is evaluated before training and after each second step."""
    training = {
        "num_steps": 2 * len(win_rates),
        "groups_per_step": 4,
        "checkpoint_every_steps": 100,
        "checkpoint_every_s": None,
        "keep_checkpoints": 2,
    }
    settings = {
        "training": training | settings,
        "eval": {"num_games_during": 10, "every_steps": 2},
    }
    run = SimulatedRun(folder, settings)
    reports = iter(win_rates)

    async def evaluate(num_games: int) -> dict[str, EvalReport]:
        await asyncio.sleep(0)
        return {"coins": make_report(next(reports))}

    run.evaluate = evaluate
    return run


def list_steps(folder: Path) -> list[int]:
    return [parse_checkpoint_step(path) for path in list_checkpoints(folder / "run/checkpoints")]


async def test_an_evaluation_better_than_all_before_is_followed_by_a_checkpoint(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, [0.9, 0.2, 0.6, 0.4, 0.5])
    await run.train()
    assert list_steps(tmp_path) == [4, 10], "the last step has no evaluation"


async def test_the_best_checkpoint_outlives_the_latest_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path, [0.0, 0.6, 0.5, 0.4, 0.3, 0.2], checkpoint_every_steps=2)
    await run.train()
    assert list_steps(tmp_path) == [2, 10, 12]


async def test_a_better_checkpoint_replaces_the_best(tmp_path: Path) -> None:
    run = make_run(tmp_path, [0.0, 0.6, 0.5, 0.4, 0.7, 0.2, 0.1], checkpoint_every_steps=2)
    await run.train()
    assert list_steps(tmp_path) == [8, 12, 14]


async def test_the_best_checkpoint_outlives_a_resume(tmp_path: Path) -> None:
    win_rates = [0.0, 0.6, 0.5, 0.4, 0.3, 0.5, 0.7, 0.2, 0.3]
    run = make_run(tmp_path, win_rates, checkpoint_every_steps=2, num_steps=20)

    def prepare(workers: SimulatedWorkers, controller: Controller) -> None:
        async def on_step(step_index: int) -> None:
            await asyncio.sleep(0)
            if step_index == 7 and not controller.stop_request.is_set:
                controller.stop_request.set()

        run.learner.on_step = on_step

    run.prepare = prepare
    assert (await run.train()).step == 8
    assert list_steps(tmp_path) == [2, 6, 8]
    run.prepare = lambda workers, controller: None
    run.settings["training"]["num_steps"] = 11
    await run.train(resume=True)
    assert list_steps(tmp_path) == [2, 10, 11]
    run.settings["training"]["num_steps"] = 17
    await run.train(resume=True)
    assert list_steps(tmp_path) == [12, 16, 17]


async def test_a_lost_learner_rolls_the_best_evaluation_back(tmp_path: Path) -> None:
    win_rates = [0.0, 0.4, 0.9, 0.5, 0.3, 0.2]
    run = make_run(tmp_path, win_rates, num_steps=9)
    has_failed = False

    def prepare(workers: SimulatedWorkers, controller: Controller) -> None:
        async def on_step(step_index: int) -> None:
            nonlocal has_failed
            await asyncio.sleep(0)
            if step_index == 5 and not has_failed:
                has_failed = True
                newest = controller.components.checkpoints.list_newest_first()[0]
                assert parse_checkpoint_step(newest) == 4
                (newest / "files.json").write_text("damaged")
                run.learner.die()

        run.learner.on_step = on_step

    run.prepare = prepare
    await run.train()
    # Step 4 is trained again from step 2, and evaluated with 0.5 instead of 0.9.
    assert list_steps(tmp_path) == [4, 9]
    evaluations = [row for row in read_metrics(tmp_path / "run") if row.kind == "eval"]
    assert [row.values["win_rate"] for row in evaluations] == [0.0, 0.4, 0.5, 0.3, 0.2]
    state = json.loads((tmp_path / "run/checkpoints/step-00000004/state.json").read_text())
    assert state["learner_restarts"] == 1

"""A stop request ends a run within its grace period, however long its steps are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.runs import EvalReport, read_metrics
from ludus.trainer.driver.loops.controller import Controller
from ludus.trainer.run.checkpoint import (
    RunState,
    find_newest_checkpoint,
    list_checkpoints,
    parse_checkpoint_step,
    read_state,
)
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers, wait_one_iteration

pytestmark = pytest.mark.timeout(120)

NUM_STEPS = 8
LONG_STEP = 3
"""Index of the step that never ends in a run that is stopped."""


def make_run(folder: Path, **training: Any) -> SimulatedRun:
    """Return an on-policy run without periodic checkpoints."""
    training = {
        "num_steps": NUM_STEPS,
        "groups_per_step": 4,
        "max_staleness": 0,
        "checkpoint_every_steps": 100,
        "stop_grace_s": 0.02,
    } | training
    return SimulatedRun(folder, {"training": training})


def stop_in_long_step(run: SimulatedRun, *, is_hurried: bool = False) -> None:
    """Make step LONG_STEP endless, and stop the run while the step runs."""

    def prepare(workers: SimulatedWorkers, controller: Controller) -> None:
        controller.stop_request.grace_s = run.config.training.stop_grace_s

        async def on_step(step: int) -> None:
            if step == LONG_STEP:
                controller.stop_request.set()
                if is_hurried:
                    controller.stop_request.hurry()
                await asyncio.Event().wait()
            await asyncio.sleep(0.03)

        run.learner.on_step = on_step

    run.prepare = prepare


def resume_normally(run: SimulatedRun) -> None:
    """Remove the endless step and the stop."""
    run.prepare = lambda workers, controller: None
    run.learner.on_step = wait_one_iteration


def list_saved_steps(folder: Path) -> list[int]:
    """Return the steps of the saved checkpoints."""
    return list(map(parse_checkpoint_step, list_checkpoints(folder / "run" / "checkpoints")))


def list_batches(run: SimulatedRun) -> dict[int, list[int]]:
    """Return the indices of the groups of each step."""
    return {step: [group.index for group in groups] for step, groups in run.batches.items()}


@pytest.mark.slow
@pytest.mark.parametrize("has_several_updates", [False, True])
async def test_long_step_is_abandoned_and_trained_again(
    tmp_path: Path, has_several_updates: bool
) -> None:
    whole_run, run = make_run(tmp_path / "whole"), make_run(tmp_path / "parts")
    await whole_run.train()
    run.learner.has_several_updates = has_several_updates
    stop_in_long_step(run)
    state = await run.train()
    assert state.step == LONG_STEP
    assert list_saved_steps(tmp_path / "parts") == [LONG_STEP]
    saved_state = read_state(
        find_newest_checkpoint(tmp_path / "parts" / "run" / "checkpoints"), RunState
    )
    assert [group.index for group in saved_state.buffered_groups] == [
        group.index for group in run.batches[LONG_STEP]
    ], "the groups of the abandoned step are lost"
    resume_normally(run)
    state = await run.train(resume=True)
    assert state.step == NUM_STEPS
    assert list_batches(run) == list_batches(whole_run)
    num_episodes = [
        [row.values["num_episodes"] for row in one_run.rows] for one_run in (run, whole_run)
    ]
    assert num_episodes[0] == num_episodes[1], "episodes are missing or counted twice"


@pytest.mark.slow
async def test_step_without_restore_point_is_finished_unless_hurried(tmp_path: Path) -> None:
    run = make_run(tmp_path, stop_grace_s=1.0, checkpoint_every_steps=2)
    run.learner.has_several_updates = True
    finish_event = asyncio.Event()

    def prepare(workers: SimulatedWorkers, controller: Controller) -> None:
        controller.stop_request.grace_s = 0.0

        async def on_step(step: int) -> None:
            if step == LONG_STEP:
                controller.stop_request.set()
                asyncio.get_running_loop().call_later(0.5, finish_event.set)
                await finish_event.wait()

        run.learner.on_step = on_step

    run.prepare = prepare
    assert (await run.train()).step == LONG_STEP + 1
    assert list_saved_steps(tmp_path)[-1] == LONG_STEP + 1


@pytest.mark.slow
async def test_hurried_stop_without_restore_point_keeps_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, stop_grace_s=1.0, checkpoint_every_steps=2)
    run.learner.has_several_updates = True
    stop_in_long_step(run, is_hurried=True)
    await run.train()
    assert list_saved_steps(tmp_path) == [2]
    resume_normally(run)
    state = await run.train(resume=True)
    assert state.step == NUM_STEPS
    assert [row.step for row in run.rows] == list(range(1, NUM_STEPS + 1))


@pytest.mark.slow
async def test_step_that_follows_a_checkpoint_is_abandoned_without_a_restore_point(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, checkpoint_every_steps=LONG_STEP)
    run.learner.has_several_updates = True
    stop_in_long_step(run)
    assert (await run.train()).step == LONG_STEP
    assert not run.learner.has_restore_point
    assert list_saved_steps(tmp_path) == [LONG_STEP]


@pytest.mark.slow
async def test_resumed_run_makes_up_for_an_abandoned_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.settings["eval"] = {"num_games_during": 10, "every_steps": 4}
    evaluated_steps: list[int] = []

    def prepare(workers: SimulatedWorkers, controller: Controller) -> None:
        controller.stop_request.grace_s = 0.02

        async def evaluate(num_games: int) -> dict[str, EvalReport]:
            evaluated_steps.append(controller.state.step)
            if evaluated_steps == [0, 4]:
                controller.stop_request.set()
                await asyncio.Event().wait()
            return {}

        run.evaluate = evaluate

    run.evaluate = lambda num_games: run.evaluate(num_games)
    run.prepare = prepare
    await run.train()
    assert list_saved_steps(tmp_path) == [4]
    await run.train(resume=True)
    assert evaluated_steps == [0, 4, 4]


@pytest.mark.slow
async def test_checkpoints_are_written_by_time(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint_every_s=0.01)

    async def on_step(step: int) -> None:
        await asyncio.sleep(1.0 if step == LONG_STEP else 0.0)

    run.learner.on_step = on_step
    await run.train()
    num_checkpoints = sum(
        row.values.get("num_checkpoints", 0) for row in read_metrics(tmp_path / "run")
    )
    assert num_checkpoints >= 2, "a step longer than the interval has no checkpoint"


@pytest.mark.slow
async def test_resumed_run_says_which_steps_it_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, stop_grace_s=1.0, checkpoint_every_steps=2)
    stop_in_long_step(run, is_hurried=True)
    run.learner.has_several_updates = True
    await run.train()
    capsys.readouterr()
    resume_normally(run)
    await run.train(resume=True)
    message = "had reached step 3, but its newest checkpoint is of step 2"
    assert message in capsys.readouterr().err

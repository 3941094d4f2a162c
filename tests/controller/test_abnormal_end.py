"""A failing run raises the first error and saves the last finished step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.errors import (
    CanaryError,
    CheckpointError,
    StoreUnavailableError,
    TrainingStalledError,
    UnavailableError,
)
from ludus.trainer.__main__ import main
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.types import SavedFile
from ludus.trainer.driver.loops.controller import Controller
from ludus.trainer.learner.step_metrics import StepMetrics
from ludus.trainer.run.checkpoint import (
    RunState,
    find_newest_checkpoint,
    list_checkpoints,
    parse_checkpoint_step,
    read_state,
)
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers, wait_one_iteration

pytestmark = pytest.mark.timeout(120)


def make_run(folder: Path, **training: Any) -> SimulatedRun:
    """Return a run that writes no periodic checkpoints."""
    training = {
        "num_steps": 20,
        "groups_per_step": 4,
        "max_staleness": 1,
        "checkpoint_every_steps": 100,
    } | training
    return SimulatedRun(folder, {"training": training})


def skip_updates(run: SimulatedRun, *steps: int) -> None:
    """Mark the updates of these 0-based steps as skipped."""
    train_step, num_skipped_in_a_row = run.learner.train_step, 0

    async def skip_chosen_steps(*args: Any, **kwargs: Any) -> StepMetrics:
        nonlocal num_skipped_in_a_row
        is_skipped = run.learner.num_steps in steps
        num_skipped_in_a_row = num_skipped_in_a_row + 1 if is_skipped else 0
        metrics = await train_step(*args, **kwargs)
        return replace(
            metrics, num_skipped_updates=int(is_skipped), num_skipped_in_a_row=num_skipped_in_a_row
        )

    run.learner.train_step = skip_chosen_steps


@pytest.mark.slow
async def test_few_skipped_updates_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    skip_updates(run, 2, 3, 7)
    state = await run.train()
    assert state.step == 20
    assert [row.step for row in run.rows if row.values["num_skipped_updates"]] == [3, 4, 8]


@pytest.mark.slow
async def test_run_stops_when_all_updates_are_skipped(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    skip_updates(run, *range(3, 20))
    with pytest.raises(TrainingStalledError, match=r"10 updates in a row .*learning_rate"):
        await run.train()
    assert run.rows[-1].step == 13
    assert read_saved_steps(tmp_path) == [13]


class UnexpectedError(Exception):
    """An unexpected error."""


@dataclass
class FailingDelivery:
    """A delivery that fails while the learner trains a step."""

    run: SimulatedRun
    step: int
    error: Exception
    failure_event: asyncio.Event = field(default_factory=asyncio.Event)

    def prepare(self, workers: SimulatedWorkers, _: Controller) -> None:
        """Make the delivery of version `step` fail while that step runs."""
        step_started = asyncio.Event()

        async def on_step(step: int) -> None:
            if step == self.step and not self.failure_event.is_set():
                step_started.set()
                await self.failure_event.wait()

        async def on_delivery(weights: PublishedWeights) -> None:
            if weights.manifest.version == self.step and not self.failure_event.is_set():
                await step_started.wait()
                # Let the run notice the failure before the step finishes.
                asyncio.get_running_loop().call_later(0.02, self.failure_event.set)
                raise self.error

        self.run.learner.on_step, workers.on_delivery = on_step, on_delivery


def read_saved_steps(folder: Path) -> list[int]:
    """Return the steps of the saved checkpoints."""
    return [
        parse_checkpoint_step(path) for path in list_checkpoints(folder / "run" / "checkpoints")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        UnexpectedError("a bug"),
        CanaryError("different weights"),
        UnavailableError("the server is down"),
    ],
)
async def test_current_step_finishes_and_is_saved_after_any_failure(
    tmp_path: Path, error: Exception
) -> None:
    run = make_run(tmp_path)
    run.prepare = FailingDelivery(run, 4, error).prepare
    with pytest.raises(
        type(error), match="continue with resume='always' from step 5"
    ) as error_info:
        await run.train()
    assert error_info.value is error
    assert read_saved_steps(tmp_path) == [5]
    assert run.learner.num_steps == 5
    assert [row.step for row in run.rows] == list(range(1, 6))
    saved_state = read_state(find_newest_checkpoint(tmp_path / "run" / "checkpoints"), RunState)
    assert saved_state.games_trained == 5 * 4 * 2

    run.prepare = lambda workers, controller: None
    run.learner.on_step = wait_one_iteration
    state = await run.train(resume=True)
    assert state.step == 20
    assert [row.step for row in run.rows] == list(range(1, 21)), "a step is missing or repeated"
    assert len(set(run.trained_indices)) == len(run.trained_indices) == 4 * 20


async def test_failed_step_is_not_saved(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint_every_steps=3)

    async def on_step(step: int) -> None:
        if step == 4:
            raise UnexpectedError("out of memory")

    run.learner.on_step = on_step
    with pytest.raises(UnexpectedError, match="continue with resume='always' from step 3"):
        await run.train()
    assert read_saved_steps(tmp_path) == [3]


async def test_failure_before_the_first_step_writes_no_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    async def on_step(step: int) -> None:
        raise UnexpectedError("out of memory")

    run.learner.on_step = on_step
    with pytest.raises(UnexpectedError, match="there is no checkpoint to continue from"):
        await run.train()
    assert read_saved_steps(tmp_path) == []


async def test_failure_of_the_last_checkpoint_does_not_hide_the_first_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path)
    error = UnexpectedError("a bug")
    run.prepare = FailingDelivery(run, 4, error).prepare

    async def fail(*_: object) -> list[SavedFile]:
        raise OSError("no space left on device")

    run.learner.save = fail
    with pytest.raises(UnexpectedError, match="there is no checkpoint") as error_info:
        await run.train()
    assert error_info.value is error
    assert "no checkpoint of step 5 can be written: " in caplog.text
    assert "cannot be written: no space left on device; " in caplog.text


@pytest.mark.parametrize("method", ["save", "ping"])
async def test_unresponsive_learner_does_not_delay_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(Controller, "last_checkpoint_timeout_s", 0.2)
    run = make_run(tmp_path)
    run.prepare = FailingDelivery(run, 4, UnexpectedError("a bug")).prepare

    async def wait_forever(*_: object) -> None:
        await asyncio.Event().wait()

    setattr(run.learner, method, wait_forever)
    with pytest.raises(UnexpectedError):
        await run.train()
    assert read_saved_steps(tmp_path) == []


async def test_unpublished_weights_are_saved(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    publish = run.learner.publish

    async def publish_or_fail(version: int, *arguments: Any) -> PublishedWeights:
        if version == 6:
            raise StoreUnavailableError("the bucket is not available")
        return await publish(version, *arguments)

    run.learner.publish = publish_or_fail
    with pytest.raises(StoreUnavailableError):
        await run.train()
    assert read_saved_steps(tmp_path) == [6]
    assert run.rows[-1].step == 6


async def test_failed_restart_saves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, checkpoint_every_steps=3)
    failing_steps = {4}

    async def on_step(step: int) -> None:
        if step in failing_steps:
            failing_steps.discard(step)
            run.learner.die()

    async def fail_to_load(folder: Path | None) -> None:
        run.learner.num_steps, run.learner.is_alive = 0, True
        raise CheckpointError("checkpoint cannot be read: bad checksum")

    run.learner.on_step = on_step
    monkeypatch.setattr(run.learner, "restart", fail_to_load)
    with pytest.raises(CheckpointError, match="bad checksum"):
        await run.train()
    assert read_saved_steps(tmp_path) == [3]


def test_command_line_prints_the_step_to_continue_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> Path:
        error = UnavailableError("the server is down")
        error.add_note("continue with --resume from step 7")
        raise error

    monkeypatch.setattr("ludus.trainer.driver.commands.train", fail)
    (tmp_path / "run.toml").write_text('name = "run"')
    assert main(["train", "--config", str(tmp_path / "run.toml")]) == 1
    message = "error: the server is down; continue with --resume from step 7\n"
    assert capsys.readouterr().err == message

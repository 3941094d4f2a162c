from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import UserError
from ludus.trainer.driver import sync_trainer
from ludus.trainer.driver.loops.steps import Step
from ludus.trainer.driver.sync_trainer import SyncTrainer


class FakeStopRequest:
    def __init__(self) -> None:
        self.num_hurries = 0

    def hurry(self) -> None:
        self.num_hurries += 1


class FakeTrainer:
    """A trainer without a run. In the phase `interrupted`, it sends Ctrl-C to its own process."""

    interrupted = ""
    num_steps_trained = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.run = LanguageModelRun()
        self.stop_request = FakeStopRequest()
        self.events: list[str] = []

    async def __aenter__(self) -> Self:
        await self._do("start")
        return self

    async def __aexit__(self, error_type: type[BaseException] | None, *_: Any) -> None:
        await self._do("end")
        self.events.append("ended" if error_type is None else f"ended by {error_type.__name__}")

    async def steps(self) -> AsyncGenerator[Step, None]:
        yield Step(1, {}, {}, (), None)
        await self._do("step")
        yield Step(2, {}, {}, (), None)

    async def _do(self, phase: str) -> None:
        self.events.append(phase)
        if phase != self.interrupted:
            return
        os.kill(os.getpid(), signal.SIGINT)
        try:
            while not self.stop_request.num_hurries:
                await asyncio.sleep(0.01)
        finally:
            await asyncio.sleep(0.01)  # cleanup that takes some time
            self.events.append(f"cleaned {phase}")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncTrainer]:
    monkeypatch.setattr(sync_trainer, "Trainer", FakeTrainer)
    # Parallel test processes ignore SIGINT.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield SyncTrainer(shows_progress=False)
    signal.signal(signal.SIGINT, handler)


def get_events(trainer: SyncTrainer) -> list[str]:
    assert all(thread.name != "training" for thread in threading.enumerate())
    return trainer._trainer.events  # type: ignore[attr-defined]


def test_steps_are_those_of_the_trainer(trainer: SyncTrainer) -> None:
    with trainer:
        assert [step.number for step in trainer.steps()] == [1, 2]
    assert get_events(trainer) == ["start", "step", "end", "ended"]


def test_steps_can_stop_early_and_inside_an_event_loop(trainer: SyncTrainer) -> None:
    async def run_cell() -> list[int]:
        with trainer:
            for step in trainer.steps():
                return [step.number]
        return []

    assert asyncio.run(run_cell()) == [1]
    assert get_events(trainer) == ["start", "end", "ended"]


def test_an_interrupt_during_a_step_ends_the_run(
    trainer: SyncTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTrainer, "interrupted", "step")
    with pytest.raises(KeyboardInterrupt), trainer:
        list(trainer.steps())
    events = ["start", "step", "cleaned step", "end", "ended by KeyboardInterrupt"]
    assert get_events(trainer) == events


def test_an_interrupt_during_the_start_waits_for_its_cleanup(
    trainer: SyncTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTrainer, "interrupted", "start")
    with pytest.raises(KeyboardInterrupt):
        trainer.__enter__()
    assert get_events(trainer) == ["start", "cleaned start"]


def test_an_interrupt_during_the_end_hurries_it_and_is_not_lost(
    trainer: SyncTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTrainer, "interrupted", "end")
    with pytest.raises(KeyboardInterrupt), trainer:
        pass
    assert get_events(trainer) == ["start", "end", "cleaned end", "ended"]


@pytest.mark.parametrize("method", ["evaluate", "save", "train"])
def test_methods_outside_the_block_are_refused(method: str) -> None:
    trainer = SyncTrainer()
    with pytest.raises(UserError, match=r"not running; use `with SyncTrainer"):
        getattr(trainer, method)()
    with pytest.raises(UserError, match="not running"):
        trainer.generate("hard 16")


def test_the_folder_and_the_metrics_of_a_run_are_those_of_its_trainer(tmp_path: Path) -> None:
    settings = ["name=demo", f"output_dir={tmp_path}"]
    trainer = SyncTrainer(overrides=settings)
    assert trainer.folder == tmp_path / "demo"
    assert trainer.metrics == {"step": [], "num_games_trained": [], "elapsed_s": []}

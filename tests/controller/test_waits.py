"""Waits for workers, groups, the buffer and evaluations have descriptions and time limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

from ludus.proto.config import EvalConfig, LanguageModelRun, LocalEnvironment
from ludus.proto.errors import (
    BufferLostError,
    EngineLostError,
    EpisodesFailedError,
    TrainingStalledError,
    WorkerStartError,
)
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.placement import place_on_one_machine
from ludus.trainer.driver.evaluation import Evaluator
from ludus.trainer.driver.loops.controller import Controller
from tests.controller.fake_workers import FakeActor, FakeFleet, FakeMethod, publish_weights
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers
from tests.env.polling import wait_until

pytestmark = pytest.mark.timeout(60)

TWO_WORKERS = {"rollout": {"num_workers": 2, "num_groups_in_flight": 16}}
ONE_WORKER = {"rollout": {"num_workers": 1, "num_groups_in_flight": 16, "group_timeout_s": 0.05}}
SHORT_IDLE_TIMEOUT = ONE_WORKER | {"training": {"idle_timeout_s": 0.1}}


async def wait_forever(*_: object) -> None:
    await asyncio.Event().wait()


async def test_worker_that_hangs_at_start_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def behave(actor: FakeActor) -> None:
        if actor.index == 1:
            actor.on_start = wait_forever

    fleet = FakeFleet(behave)
    settings = TWO_WORKERS | {"placement": {"start_timeout_s": 0.1}}
    async with fleet.run_workers(monkeypatch, settings) as workers:
        await wait_until(lambda: len(fleet.actors) == 3 and len(workers.roster.ready_workers) == 2)
        assert not fleet.actors[1].is_alive
    assert "rollout worker 1 to load the model and to build its engine" in caplog.text
    assert "placement.start_timeout_s = 0.1" in caplog.text


async def test_run_stops_if_all_workers_hang_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def behave(actor: FakeActor) -> None:
        actor.on_start = wait_forever

    settings = ONE_WORKER | {"placement": {"start_timeout_s": 0.1}}
    with pytest.raises(WorkerStartError, match=r"load.* the model.*start_timeout_s = 0\.1"):
        async with FakeFleet(behave).run_workers(monkeypatch, settings):
            raise AssertionError("a worker started")


async def test_run_stops_if_workers_cannot_be_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def behave(actor: FakeActor) -> None:
        actor.on_ping = wait_forever

    settings = TWO_WORKERS | {"placement": {"start_timeout_s": 0.1}}
    with pytest.raises(WorkerStartError, match=r"0 of 2 .*; worker 0 waits for room; worker 1"):
        async with FakeFleet(behave).run_workers(monkeypatch, settings):
            raise AssertionError("a worker started")


async def test_state_of_each_worker_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def behave(actor: FakeActor) -> None:
        if actor.index == 1:
            actor.on_start = wait_forever

    async with FakeFleet(behave).run_workers(monkeypatch, TWO_WORKERS) as workers:
        slot = await workers.acquire_slot()
        await wait_until(lambda: "builds" in workers.describe())
        assert workers.describe() == (
            "1 of 2 rollout workers ready; worker 1 loads the model and builds its engine; "
            f"worker 0 plays {slot.max_groups} groups"
        )
        workers.resize(1)
        await wait_until(lambda: workers.describe().startswith("1 of 1 "))


@pytest.mark.parametrize("operation", ["evaluation", "weights"])
async def test_wait_for_a_lost_worker_ends_at_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def behave(actor: FakeActor) -> None:
        if actor.index > 0:
            actor.on_start = wait_forever

    fleet = FakeFleet(behave)
    async with fleet.run_workers(monkeypatch, SHORT_IDLE_TIMEOUT) as workers:
        fleet.actors[0].kill(EngineLostError("the engine has failed"))
        await wait_until(lambda: len(fleet.actors) == 2)
        with pytest.raises(
            WorkerStartError, match=r"0 of 1 .*worker 0 loads the model.*idle_timeout_s = 0\.1"
        ):
            if operation == "evaluation":
                await workers.evaluate("coins", range(4), 1.0)
            else:
                await workers.load_weights(publish_weights(1), 60)


class FrozenBuffer:
    """A buffer actor that never responds."""

    def __init__(self, **_: object) -> None:
        pass

    def __call__(self, _: type) -> FrozenBuffer:
        return self

    def remote(self, *_: object) -> FrozenBuffer:
        """Return the actor."""
        return self

    def __getattr__(self, method: str) -> Any:
        return FrozenCall(wait_forever)


class FrozenCall(FakeMethod):
    """A remote method that never responds."""

    def options(self, **_: object) -> FrozenCall:
        """Return this method."""
        return self

    def remote(self, *arguments: Any) -> Any:
        """Return the pending call. `take` returns a pair of results."""
        call = super().remote(*arguments)
        return (call, None) if len(arguments) == 2 and isinstance(arguments[1], float) else call


async def test_unresponsive_buffer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "remote", FrozenBuffer)
    run = LanguageModelRun.model_validate(SHORT_IDLE_TIMEOUT)
    buffer = RemoteBuffer(run, place_on_one_machine(run))
    await buffer.begin([1], 0)
    with pytest.raises(
        BufferLostError, match=r"'take' longer than training\.idle_timeout_s = 0\.1"
    ):
        await buffer.take(0, 1.0)
    with pytest.raises(BufferLostError, match=r"'copy_state'"):
        await buffer.copy_state()


async def test_slow_evaluation_ends_at_the_time_limit() -> None:
    class SlowWorkers:
        async def evaluate(self, *_: object) -> list[Any]:
            await wait_forever()
            return []

    config = EvalConfig(num_games=8, timeout_s=0.1)
    evaluator = Evaluator(config, {"blackjack": LocalEnvironment()}, SlowWorkers(), {})
    with pytest.raises(
        EpisodesFailedError, match=r"8 episodes.*'blackjack'.*eval\.timeout_s = 0\.1"
    ):
        await evaluator.evaluate(8)


@pytest.mark.slow
async def test_run_without_finished_groups_stops_and_reports_them(tmp_path: Path) -> None:
    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        workers.duration_s = lambda spec: 0.001 if spec.index < 8 else 3600.0

    training = {"num_steps": 20, "groups_per_step": 4, "idle_timeout_s": 0.3}
    rollout = {"num_groups_in_flight": 8, "group_size": 2, "group_timeout_s": 0.1}
    run = SimulatedRun(tmp_path, {"training": training, "rollout": rollout})
    run.prepare = prepare
    with pytest.raises(
        TrainingStalledError,
        match=r"idle_timeout_s = 0\.3: groups being played: 4 in 'coins'; 1 of",
    ) as error_info:
        await run.train()
    assert error_info.value.__notes__ == ["continue with resume='always' from step 2"]

"""What waits for workers, groups, the buffer or games says so, and gives up in the end."""

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
from ludus.trainer.actors.placement import on_one_machine
from ludus.trainer.driver.evaluation import Evaluator
from ludus.trainer.driver.loops.controller import Controller
from tests.controller.fake_workers import FakeActor, FakeFleet, Method, weights_of
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers
from tests.env.polling import eventually

pytestmark = pytest.mark.timeout(60)

TWO = {"rollout": {"num_workers": 2, "num_groups_in_flight": 16}}
ALONE = {"rollout": {"num_workers": 1, "num_groups_in_flight": 16, "group_timeout_s": 0.05}}
NO_PATIENCE = ALONE | {"training": {"idle_timeout_s": 0.1}}


async def for_ever(*_: object) -> None:
    """Wait for what does not come."""
    await asyncio.Event().wait()


async def test_a_worker_that_hangs_while_it_starts_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def behave(actor: FakeActor) -> None:
        if actor.place == 1:
            actor.in_start = for_ever

    fleet = FakeFleet(behave)
    settings = TWO | {"placement": {"start_timeout_s": 0.1}}
    async with fleet.running(monkeypatch, settings) as workers:
        await eventually(lambda: len(fleet.actors) == 3 and workers.num_ready == 2)
        assert not fleet.actors[1].is_alive
    assert "rollout worker 1 to load the model and to build its engine" in caplog.text
    assert "placement.start_timeout_s = 0.1" in caplog.text


async def test_a_run_whose_workers_hang_while_they_start_ends_and_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def behave(actor: FakeActor) -> None:
        actor.in_start = for_ever

    settings = ALONE | {"placement": {"start_timeout_s": 0.1}}
    with pytest.raises(WorkerStartError, match=r"load.* the model.*start_timeout_s = 0\.1"):
        async with FakeFleet(behave).running(monkeypatch, settings):
            raise AssertionError("none has started")


async def test_a_run_whose_workers_find_no_room_ends_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def behave(actor: FakeActor) -> None:
        actor._sign_of_life = for_ever

    settings = TWO | {"placement": {"start_timeout_s": 0.1}}
    with pytest.raises(WorkerStartError, match=r"0 of 2 .*; worker 0 waits for room; worker 1"):
        async with FakeFleet(behave).running(monkeypatch, settings):
            raise AssertionError("none has started")


async def test_what_each_worker_does_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def behave(actor: FakeActor) -> None:
        if actor.place == 1:
            actor.in_start = for_ever

    async with FakeFleet(behave).running(monkeypatch, TWO) as workers:
        slot = await workers.slot()
        await eventually(lambda: "builds" in workers.describe())
        assert workers.describe() == (
            "1 of 2 rollout workers ready; worker 1 loads the model and builds its engine; "
            f"worker 0 plays {slot.size} groups"
        )
        workers.resize(1)
        await eventually(lambda: workers.describe().startswith("1 of 1 "))


@pytest.mark.parametrize("waits_for", ["evaluation", "weights"])
async def test_who_waits_for_a_worker_that_does_not_come_back_gives_up(
    monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    def behave(actor: FakeActor) -> None:
        if actor.place > 0:
            actor.in_start = for_ever

    fleet = FakeFleet(behave)
    async with fleet.running(monkeypatch, NO_PATIENCE) as workers:
        fleet.actors[0].end(EngineLostError("the engine has failed"))
        await eventually(lambda: len(fleet.actors) == 2)
        with pytest.raises(
            WorkerStartError, match=r"0 of 1 .*worker 0 loads the model.*idle_timeout_s = 0\.1"
        ):
            if waits_for == "evaluation":
                await workers.evaluate("coins", range(4), 1.0)
            else:
                await workers.load_weights(weights_of(1), 60)


class FrozenBuffer:
    """A buffer's actor whose process answers nothing."""

    def __init__(self, **_: object) -> None:
        pass

    def __call__(self, _: type) -> FrozenBuffer:
        return self

    def remote(self, *_: object) -> FrozenBuffer:
        """The actor."""
        return self

    def __getattr__(self, method: str) -> Any:
        return FrozenCall(for_ever)


class FrozenCall(Method):
    """A call of it."""

    def options(self, **_: object) -> FrozenCall:
        """The call itself."""
        return self

    def remote(self, *arguments: Any) -> Any:
        """What is waited for, once or, of `take`, twice."""
        call = super().remote(*arguments)
        return (call, None) if len(arguments) == 2 and isinstance(arguments[1], float) else call


async def test_a_buffer_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "remote", FrozenBuffer)
    run = LanguageModelRun.model_validate(NO_PATIENCE)
    buffer = RemoteBuffer(run, on_one_machine(run))
    await buffer.begin([1], 0)
    with pytest.raises(
        BufferLostError, match=r"'take' longer than training\.idle_timeout_s = 0\.1"
    ):
        await buffer.take(0, 1.0)
    with pytest.raises(BufferLostError, match=r"'state'"):
        await buffer.state()


async def test_an_evaluation_that_takes_too_long_ends_with_its_limit() -> None:
    class Workers:
        async def evaluate(self, *_: object) -> list[Any]:
            await for_ever()
            return []

    config = EvalConfig(num_games=8, timeout_s=0.1)
    evaluator = Evaluator(config, {"blackjack": LocalEnvironment()}, Workers(), {})
    with pytest.raises(
        EpisodesFailedError, match=r"8 episodes.*'blackjack'.*eval\.timeout_s = 0\.1"
    ):
        await evaluator.evaluate(8)


async def test_a_run_of_which_no_group_ends_says_who_plays_what_and_ends(tmp_path: Path) -> None:
    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        workers.duration_s = lambda spec: 0.001 if spec.index < 8 else 3600.0

    training = {"num_steps": 20, "groups_per_step": 4, "idle_timeout_s": 0.3}
    rollout = {"num_groups_in_flight": 8, "group_size": 2, "group_timeout_s": 0.1}
    run = SimulatedRun(tmp_path, {"training": training, "rollout": rollout})
    run.prepare = prepare
    with pytest.raises(
        TrainingStalledError,
        match=r"idle_timeout_s = 0\.3: groups being played: 4 in 'coins'; 1 of",
    ) as raised:
        await run.go()
    assert raised.value.__notes__ == ["continue with --resume from step 2"]

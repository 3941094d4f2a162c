"""A rollout worker abandons groups on request and never returns to older weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ludus.env.types import TaskSet
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import EngineLostError, WeightSyncError
from ludus.proto.seeds import FIRST_EVAL_SEED
from ludus.trainer.actors import rollout_worker
from ludus.trainer.actors.rollout_worker import (
    RolloutWorkerActor,
    RolloutWorkerSpec,
    WorkerComponents,
)
from ludus.trainer.core.interfaces import FetchedWeights, PublishedWeights
from ludus.trainer.core.types import Rollout, RolloutStatus, Sampling
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.group import GroupPlayer
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode, Reward
from ludus.trainer.rollout.runner import EpisodeRunner, EpisodeStart
from tests.controller.fake_workers import make_groups, publish_weights
from tests.env.polling import run_pending_tasks
from tests.rollout.fake_engine import FakeEngine

pytestmark = pytest.mark.timeout(60)


class DelayedStore:
    """A store that delays fetches of version 1 until `release_event` is set."""

    def __init__(self, release_event: threading.Event) -> None:
        self._release_event = release_event

    def fetch(self, weights: PublishedWeights) -> FetchedWeights:
        """Return a tensor that contains the version."""
        version = weights.manifest.version
        if version == 1:
            assert self._release_event.wait(timeout=60)
        return FetchedWeights({"w": torch.tensor(float(version))}, 4, 0.0)


class EndlessRunner:
    """A runner whose episodes never end."""

    plays_groups_together = False

    async def play_episodes(self, *_: Any, **__: Any) -> list[Any]:
        await asyncio.Event().wait()
        raise AssertionError


class RecordingRunner:
    """A runner that records the sampling parameters of its calls and plays nothing."""

    plays_groups_together = False

    def __init__(self) -> None:
        self.samplings: list[Sampling] = []

    async def play_episodes(self, starts: object, sampling: Sampling, **_: Any) -> list[Any]:
        """Record the call, and return no episodes."""
        self.samplings.append(sampling)
        return []


def make_worker(
    engine: FakeEngine,
    runner: EpisodeRunner | None = None,
    tasks: TaskSet | None = None,
    **sections: object,
) -> tuple[RolloutWorkerActor, AsyncEngine]:
    """Return a started worker and its engine; `sections` are those of the run."""
    run, async_engine = LanguageModelRun.model_validate(sections), AsyncEngine(engine)
    player = GroupPlayer(
        runner or EndlessRunner(), Reward(), timeout_s=60.0, max_evaluation_episodes=1, tasks=tasks
    )
    components = WorkerComponents(run, run.weights, async_engine, {"coins": player})
    return RolloutWorkerActor(torch.get_num_threads(), components), async_engine


async def test_abandoned_groups_are_lost() -> None:
    worker, _ = make_worker(FakeEngine())
    play_task = asyncio.create_task(worker.play(make_groups(3, 4)))
    await run_pending_tasks()
    assert not play_task.done()
    await worker.abandon()
    groups = await play_task
    assert [group.index for group in groups] == [3, 4]
    assert all(rollout.reward is None for group in groups for rollout in group.rollouts)
    await worker.close()


@pytest.mark.parametrize("call", ["load_weights", "score"])
async def test_groups_are_lost_when_loading_or_scoring_fails(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no more memory")

    engine = FakeEngine()
    monkeypatch.setattr(engine, call, fail)
    monkeypatch.setattr(rollout_worker, "make_store", lambda _: DelayedStore(threading.Event()))
    worker, _ = make_worker(engine)
    play_task = asyncio.create_task(worker.play(make_groups(3)))
    await run_pending_tasks()
    with pytest.raises(MemoryError):
        await worker.load_weights(publish_weights(2, (-1.0,)), True)
    [group] = await asyncio.wait_for(play_task, 60)
    assert all(rollout.reward is None for rollout in group.rollouts)
    await worker.close()


async def test_late_fetch_does_not_load_older_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release_event, engine = threading.Event(), FakeEngine()
    monkeypatch.setattr(rollout_worker, "make_store", lambda _: DelayedStore(release_event))
    worker, _ = make_worker(engine)
    late_load_task = asyncio.create_task(worker.load_weights(publish_weights(1, (-1.0,)), True))
    await run_pending_tasks()
    weights = await worker.load_weights(publish_weights(2, (-1.0,)), True)
    assert weights.canary.version == 2
    release_event.set()
    with pytest.raises(WeightSyncError, match="version 1 arrived after a later version"):
        await late_load_task
    assert [float(state["w"]) for state in engine.loaded_states] == [2.0]
    await worker.close()


async def test_engine_failure_is_reported_to_the_waiter() -> None:
    engine = FakeEngine()
    worker, async_engine = make_worker(engine)
    close_task = asyncio.create_task(worker.wait_until_closed())
    engine.failure = MemoryError("out of memory")
    with pytest.raises(EngineLostError):
        await async_engine([1], Sampling(1.0, 4), 0)
    with pytest.raises(EngineLostError, match="MemoryError: out of memory"):
        await close_task


async def test_evaluation_changes_only_the_temperature_of_the_sampling() -> None:
    runner = RecordingRunner()
    cuts = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    worker, _ = make_worker(
        FakeEngine(),
        runner,
        rollout={"temperature": 0.7, "max_completion_tokens": 8, **cuts},
        algorithm={"correction": {"kind": "off"}, "geometric_mask": None},
    )
    await worker.evaluate("coins", [1], 0.5)
    assert runner.samplings == [Sampling(temperature=0.5, max_tokens=8, **cuts)]
    await worker.close()


class SeedRunner:
    """A runner whose episodes return the random key of their start."""

    plays_groups_together = False

    async def play_episodes(
        self, starts: Sequence[EpisodeStart], sampling: Sampling, **_: Any
    ) -> list[PlayedEpisode]:
        return [
            PlayedEpisode(
                Rollout(
                    "coins", start.seed, (), 0.0, float(start.key), (), RolloutStatus.TERMINATED, 1
                )
            )
            for start in starts
        ]


async def test_games_of_a_repeated_task_start_equally_and_sample_differently() -> None:
    worker, _ = make_worker(FakeEngine(), SeedRunner(), tasks=TaskSet(5, num_test_tasks=3))
    seeds = range(FIRST_EVAL_SEED + 1, FIRST_EVAL_SEED + 9)
    outcomes = await worker.evaluate("coins", seeds, 1.0)
    assert [outcome.seed for outcome in outcomes] == list(seeds)
    assert [outcome.task - FIRST_EVAL_SEED for outcome in outcomes] == [1, 2, 0, 1, 2, 0, 1, 2]
    assert len({outcome.episode_return for outcome in outcomes}) == 8
    await worker.close()


async def test_close_is_reported_to_the_waiter() -> None:
    worker, _ = make_worker(FakeEngine())
    close_task = asyncio.create_task(worker.wait_until_closed())
    await run_pending_tasks()
    await worker.close()
    await close_task


async def test_event_loop_responds_while_the_engine_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, release_event = [], threading.Event()

    def make_slow_engine(*_: object) -> FakeEngine:
        assert release_event.wait(timeout=60)
        order.append("engine")
        return FakeEngine()

    async def connect(*_: object) -> None:
        order.append("connect")
        raise ConnectionError("end of the test")

    monkeypatch.setattr(rollout_worker.ChatTokenizer, "load", lambda *_: None)
    monkeypatch.setattr(rollout_worker, "make_engine", make_slow_engine)
    monkeypatch.setattr(rollout_worker.RolloutWorkerActor, "_connect", connect)
    run = LanguageModelRun()
    worker = RolloutWorkerActor(torch.get_num_threads())
    spec = RolloutWorkerSpec(run, "model", {"openspiel": "address"}, run.weights)
    start_task = asyncio.create_task(worker.start(spec))
    for _ in range(3):
        await worker.ping()
        await asyncio.sleep(0)
    assert not start_task.done()
    release_event.set()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(start_task, 60)
    assert order == ["engine", "connect"]


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
async def test_worker_uses_the_configured_device_of_a_machine_with_gpus(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    devices = []

    def record_device(run: object, path: object, chat: object, device: torch.device) -> None:
        devices.append(device)
        raise RuntimeError("end of the test")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rollout_worker.ChatTokenizer, "load", lambda *_: None)
    monkeypatch.setattr(rollout_worker, "make_engine", record_device)
    for num_gpus in (0, 0.5, 1):
        sections = {"generator": {"kind": kind}, "rollout": {"num_gpus_per_worker": num_gpus}}
        run = LanguageModelRun.model_validate(sections)
        spec = RolloutWorkerSpec(run, "model", {}, run.weights)
        with pytest.raises(RuntimeError, match="end of the test"):
            await RolloutWorkerActor(torch.get_num_threads()).start(spec)
    assert [device.type for device in devices] == ["cpu", "cuda", "cuda"]

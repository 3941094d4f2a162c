"""Rollout workers without Ray or engines: real supervision of simulated processes.

RolloutWorkers  -->  FakeActor   one simulated process per worker, with hooks
      |
      +-->  CountingBuffer       accepts played groups and refuses lost groups
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import ray

from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import EngineLostError
from ludus.trainer.actors import roster, supervisor
from ludus.trainer.actors.placement import UNLIMITED_ACTORS, place_on_one_machine
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.types import GroupSpec, RolloutGroup, ScoringRequest, WeightManifest
from ludus.trainer.data.buffer import Refusal
from ludus.trainer.weights.canary import CanaryReport, WorkerWeights
from tests.data.rollouts import make_group


class FakeMethod:
    """A method of a simulated actor."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> asyncio.Task[Any]:
        """Start the call and return its task."""
        return asyncio.ensure_future(self._call(*arguments))


async def wait_one_iteration(*_: object) -> None:
    """Wait for one iteration of the event loop."""
    await asyncio.sleep(0)


@dataclass(eq=False)
class FakeActor:
    """A simulated process of a rollout worker."""

    index: int
    """Number of processes that were started earlier."""
    on_ping: Callable[[], Awaitable[None]] = wait_one_iteration
    """Hook of each ping. The first ping returns when Ray has placed the process."""
    on_start: Callable[[], Awaitable[None]] = wait_one_iteration
    """Hook of the worker's start."""
    on_play: Callable[[FakeActor], Awaitable[None]] = wait_one_iteration
    """Hook of each call that plays groups."""
    on_load: Callable[[PublishedWeights], Awaitable[None]] = wait_one_iteration
    """Hook of each call that loads weights."""
    canary_error: Callable[[PublishedWeights], float] = lambda weights: 0.0
    """Function that returns the canary error of loaded weights, as a log-prob difference."""
    from_scratch_loads: list[bool] = field(default_factory=list)
    """Argument `from_scratch` of each load. True means that all weights are fetched again."""
    num_abandon_calls: int = 0
    """Number of calls of `abandon`."""
    number: int = -1
    """Number of the worker; -1 before the start."""
    is_alive: bool = True
    num_playing: int = 0
    """Number of groups being played."""
    max_playing: int = 0
    """Highest value of `num_playing` so far."""
    end_future: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Future that finishes when the process closes or dies."""

    def __getattr__(self, name: str) -> FakeMethod:
        return FakeMethod(object.__getattribute__(self, f"_{name}"))

    def kill(self, error: Exception | None = None) -> None:
        """Kill the process. Waiting calls raise `error`, by default a RayActorError."""
        self.is_alive = False
        if not self.end_future.done():
            self.end_future.set_exception(
                error or ray.exceptions.RayActorError(error_msg="the process died")
            )
            self.end_future.exception()  # marks the exception as retrieved

    async def _start(self, spec: RolloutWorkerSpec) -> str:
        self.number = spec.number
        await self.on_start()
        return "this node"

    async def _play(self, groups: Sequence[GroupSpec]) -> list[RolloutGroup]:
        self.num_playing += len(groups)
        self.max_playing = max(self.max_playing, self.num_playing)
        try:
            await self.on_play(self)
        finally:
            self.num_playing -= len(groups)
        return [make_group(1.0, -1.0, index=group.index) for group in groups]

    async def _load_weights(self, weights: PublishedWeights, from_scratch: bool) -> WorkerWeights:
        self.from_scratch_loads.append(from_scratch)
        await self.on_load(weights)
        manifest, error = weights.manifest, self.canary_error(weights)
        report = CanaryReport(manifest.version, manifest.content_hash, error)
        return WorkerWeights(report, 0.0, 0.0, 0)

    async def _abandon(self) -> None:
        self.num_abandon_calls += 1

    async def _evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        await asyncio.sleep(0)
        if not self.is_alive:
            raise EngineLostError("the engine has failed")
        return [EpisodeOutcome(seed, 1.0, 1) for seed in seeds]

    async def _wait_until_closed(self) -> None:
        await asyncio.shield(self.end_future)

    async def _ping(self) -> None:
        await self.on_ping()
        # A process with a failed engine still responds.
        if self.end_future.done() and isinstance(
            self.end_future.exception(), ray.exceptions.RayError
        ):
            await self.end_future

    async def _close(self) -> None:
        if not self.end_future.done():
            self.end_future.set_result(None)


class CountingBuffer:
    """A buffer that records the indices of its groups."""

    def __init__(self) -> None:
        self.kept_indices: list[int] = []
        self.lost_indices: list[int] = []

    async def put(
        self, groups: Awaitable[list[RolloutGroup]] | list[RolloutGroup]
    ) -> list[Refusal]:
        """Record the groups; return a refusal for each group whose episodes are all lost."""
        played_groups = groups if isinstance(groups, list) else await groups
        lost_indices = [
            group.index
            for group in played_groups
            if all(rollout.reward is None for rollout in group.rollouts)
        ]
        self.lost_indices += lost_indices
        self.kept_indices += [
            group.index for group in played_groups if group.index not in lost_indices
        ]
        return [Refusal(index, is_lost=True) for index in lost_indices]


@dataclass(eq=False)
class FakeFleet:
    """All started processes and their buffer."""

    behave: Callable[[FakeActor], None] = lambda actor: None
    """Function that sets the hooks of each new process."""
    actors: list[FakeActor] = field(default_factory=list)
    buffer: CountingBuffer = field(default_factory=CountingBuffer)

    @asynccontextmanager
    async def run_workers(
        self,
        monkeypatch: pytest.MonkeyPatch,
        settings: dict[str, Any],
        max_workers: int = UNLIMITED_ACTORS,
    ) -> AsyncIterator[RolloutWorkers]:
        """Start the workers of a run with these settings; yield them."""
        monkeypatch.setattr(roster, "make_actor", self._make_actor)
        monkeypatch.setattr(roster.RolloutWorkerHandle, "kill", lambda worker: worker.actor.kill())
        monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.0)
        run = LanguageModelRun.model_validate(
            {"environments": {"coins": {"max_sessions": 10**6}}} | settings
        )
        spec = RolloutWorkerSpec(run, "model", {"coins": "nowhere"}, run.weights)
        placement = replace(place_on_one_machine(run), max_workers=max_workers)
        workers = await RolloutWorkers.start(spec, self.buffer, placement)
        try:
            yield workers
        finally:
            await workers.close()

    def _make_actor(self, *_: object) -> FakeActor:
        actor = FakeActor(len(self.actors))
        self.behave(actor)
        self.actors.append(actor)
        return actor


def make_groups(*indices: int) -> list[GroupSpec]:
    """Return group specs with these indices."""
    return [GroupSpec(index, "coins", (0, 0)) for index in indices]


def publish_weights(version: int, logprobs: tuple[float, ...] = ()) -> PublishedWeights:
    """Return published weights of `version` with the learner's canary log-probs."""
    prompt = ScoringRequest([1], [2])
    manifest = WeightManifest(version, (), f"content {version}", (prompt,), (logprobs,))
    return PublishedWeights(manifest, ())

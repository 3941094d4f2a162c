"""The actors of one kind as one object: what the controller talks to.

LearnerGroup     num_ranks LearnerActors, called together
RolloutWorkers   num_workers RolloutWorkerActors, each called for itself
Buffer           one BufferActor
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.config import RunConfig, WeightStoreConfig
from ludus.proto.errors import CanaryError, WeightSyncError
from ludus.trainer.actors.buffer import BufferActor, TakenGroups
from ludus.trainer.actors.learner import LearnerActor
from ludus.trainer.actors.rollout_worker import RolloutWorkerActor, RolloutWorkerSpec
from ludus.trainer.interfaces import PublishedWeights
from ludus.trainer.learner.learner import LearnerSpec, StepMetrics
from ludus.trainer.rollout.vllm_environment import vllm_environment
from ludus.trainer.types import Batch, Coefficients, GroupSpec, Probe, RolloutGroup
from ludus.trainer.weights import CanaryReport

_log = logging.getLogger(__name__)


class Buffer:
    """The replay buffer."""

    def __init__(self, run: RunConfig) -> None:
        self.actor: ActorHandle = ray.remote(num_cpus=0)(BufferActor).remote(
            max_staleness=run.training.max_staleness,
            keep_dead_groups=run.algorithm.dead_groups == "keep",
        )

    async def put(self, groups: Sequence[RolloutGroup]) -> int:
        """The number of groups that were not taken in and must be replaced."""
        return await self.actor.put.remote(list(groups))

    async def take(self, num_groups: int, version: int, timeout_s: float) -> TakenGroups:
        """See BufferActor.take."""
        return await self.actor.take.remote(num_groups, version, timeout_s)

    async def groups(self) -> tuple[RolloutGroup, ...]:
        """The waiting groups, oldest first."""
        return await self.actor.groups.remote()


class LearnerGroup:
    """All ranks of the learner; each call goes to all of them and returns rank 0's answer."""

    def __init__(self, run: RunConfig) -> None:
        config = run.learner
        self._ranks: list[ActorHandle] = [
            ray.remote(num_cpus=0, num_gpus=config.num_gpus_per_rank)(LearnerActor).remote(
                rank, config.num_threads
            )
            for rank in range(config.num_ranks)
        ]

    async def start(self, spec: LearnerSpec, weights: WeightStoreConfig) -> None:
        """Nothing; the ranks have met and hold the model."""
        address = await self._ranks[0].rendezvous.remote()
        await self._all("start", address, len(self._ranks), spec, weights)

    async def train_step(self, batch: Batch, coefficients: Coefficients) -> StepMetrics:
        """What the step did."""
        # Put once: the ranks of a machine map the same memory.
        reference = ray.put(batch)
        return await self._all("train_step", reference, coefficients)

    async def publish(self, version: int, probe: Probe) -> PublishedWeights:
        """The version, fetchable."""
        return await self._all("publish", version, probe)

    async def answer_logprobs(self, probes: Sequence[Probe]) -> list[list[float]]:
        """The log-probs of each probe's completion under the policy."""
        return await self._all("answer_logprobs", list(probes))

    async def save(self, state_folder: Path, model_folder: Path) -> None:
        """Nothing; writes the learner's state, and the model as a Hugging Face folder."""
        await self._all("save", state_folder.absolute(), model_folder.absolute())

    async def load(self, folder: Path) -> None:
        """Nothing; goes on from a checkpoint."""
        await self._all("load", folder.absolute())

    async def _all(self, method: str, *args: object) -> Any:
        calls = [getattr(rank, method).remote(*args) for rank in self._ranks]
        return (await asyncio.gather(*calls))[0]


@dataclass(slots=True)
class RolloutWorkers:
    """The rollout workers; one that dies is replaced and holds the newest weights again."""

    specs: list[RolloutWorkerSpec]
    buffer: Buffer
    _actors: list[ActorHandle]
    _newest: PublishedWeights | None = None
    num_restarts: int = 0

    @classmethod
    async def start(cls, specs: list[RolloutWorkerSpec], buffer: Buffer) -> RolloutWorkers:
        """The workers, ready to play."""
        actors = await asyncio.gather(*(_start_worker(spec) for spec in specs))
        return cls(specs, buffer, list(actors))

    def __len__(self) -> int:
        return len(self._actors)

    async def play(self, index: int, groups: Sequence[GroupSpec]) -> int:
        """The number of groups that must be replaced; the others are in the buffer."""
        try:
            # The groups go from worker to buffer without passing through this process.
            played = self._actors[index].play.remote(list(groups))
            return await self.buffer.actor.put.remote(played)
        except ray.exceptions.RayActorError:
            await self._replace(index)
            return len(groups)

    async def evaluate(self, seeds: Sequence[int], temperature: float) -> list[EpisodeOutcome]:
        """The outcome of one game per seed, in their order."""
        num = len(self._actors)
        parts = [
            self._ask(index, "evaluate", list(seeds[index::num]), temperature)
            for index in range(num)
        ]
        outcomes = [outcome for part in await asyncio.gather(*parts) for outcome in part]
        return sorted(outcomes, key=lambda outcome: outcome.seed)

    async def load_weights(
        self, published: PublishedWeights, timeout_s: float
    ) -> list[CanaryReport]:
        """The canary reports of all workers, which now sample from the published weights.

        Raises:
            CanaryError: a worker does not sample from them; it must take no traffic.
            WeightSyncError: a worker did not hold them in time.
        """
        self._newest = published
        loads = [self._ask(i, "load_weights", published) for i in range(len(self._actors))]
        try:
            async with asyncio.timeout(timeout_s):
                reports: list[CanaryReport] = await asyncio.gather(*loads)
        except TimeoutError:
            raise WeightSyncError(
                f"weights version {published.manifest.version} "
                f"({published.manifest.num_bytes} bytes) did not reach all "
                f"{len(loads)} rollout workers within weights.timeout_s = {timeout_s:g}; "
                "raise it, or see trainer.log for what the workers do"
            ) from None
        for report in reports:
            if not report.ok:
                raise CanaryError(str(report))
        return reports

    async def close(self) -> None:
        """Nothing; ends engines and connections."""
        closing = [actor.close.remote() for actor in self._actors]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _ask(self, index: int, method: str, *args: object) -> Any:
        """A worker's answer; if it dies over the question, that of the one that replaces it."""
        try:
            return await getattr(self._actors[index], method).remote(*args)
        except ray.exceptions.RayActorError:
            await self._replace(index)
            return await getattr(self._actors[index], method).remote(*args)

    async def _replace(self, index: int) -> None:
        """Nothing; several calls that died with one worker replace it once."""
        dead = self._actors[index]
        async with _REPLACING:
            if self._actors[index] is not dead:
                return
            _log.warning("rollout worker %d died; starting another", index)
            self.num_restarts += 1
            actor = await _start_worker(self.specs[index])
            if self._newest is not None:
                report = await actor.load_weights.remote(self._newest)
                if not report.ok:
                    raise CanaryError(str(report))
            self._actors[index] = actor


_REPLACING = asyncio.Lock()


async def _start_worker(spec: RolloutWorkerSpec) -> ActorHandle:
    rollout = spec.run.rollout
    # Engines read their environment when Python starts, before any code of ours.
    environment = vllm_environment(rollout.num_threads, on_gpu=rollout.num_gpus_per_worker > 0)
    worker_class = ray.remote(
        num_cpus=0,
        num_gpus=rollout.num_gpus_per_worker,
        runtime_env={"env_vars": environment},
    )(RolloutWorkerActor)
    actor = worker_class.remote(rollout.num_threads)
    await actor.start.remote(spec)
    return actor

"""The actors of one kind as one object: what the controller talks to.

LearnerGroup     num_ranks LearnerActors, called together
Buffer           one BufferActor

The rollout workers, which come and go, are in workers.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from ludus.proto.config import RunConfig, WeightStoreConfig
from ludus.proto.errors import LearnerLostError
from ludus.trainer.actors.buffer import BufferActor, TakenGroups
from ludus.trainer.actors.learner import LearnerActor
from ludus.trainer.data.buffer import BufferState
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.interfaces import PublishedWeights
from ludus.trainer.learner.learner import LearnerSpec, StepMetrics
from ludus.trainer.types import Batch, CanaryPrompt, Coefficients, RolloutGroup

_log = logging.getLogger(__name__)


class Buffer:
    """The replay buffer."""

    def __init__(self, run: RunConfig) -> None:
        self.actor: ActorHandle = ray.remote(num_cpus=0)(BufferActor).remote(run)

    async def begin(self, indices: Sequence[int], version: int) -> None:
        """See BufferActor.begin."""
        await self.actor.begin.remote(list(indices), version)

    async def settle(self, indices: Sequence[int]) -> list[int]:
        """See BufferActor.settle."""
        return await self.actor.settle.remote(list(indices))

    async def put_played(self, groups: ray.ObjectRef | list[RolloutGroup]) -> int:
        """The number of groups that must be replaced; they come from where they were played."""
        return await self.actor.put.remote(groups)

    def raise_if_lost(self, error: ray.exceptions.RayError) -> None:
        """Nothing, unless it is the buffer that died: what waited in it is gone, so that raises."""
        if getattr(error, "actor_id", None) == self.actor._actor_id.hex():
            raise error

    async def take(self, version: int, timeout_s: float) -> TakenGroups:
        """See BufferActor.take."""
        return await self.actor.take.remote(version, timeout_s)

    async def state(self) -> BufferState:
        """See BufferActor.state."""
        return await self.actor.state.remote()

    async def restore(
        self, groups: Sequence[RolloutGroup], counts: Mapping[str, RolloutCounts], version: int
    ) -> int:
        """See BufferActor.restore."""
        return await self.actor.restore.remote(list(groups), dict(counts), version)


class LearnerGroup:
    """All ranks of the learner; each call goes to all of them and returns rank 0's answer.

    A rank that dies leaves the others waiting in a collective. So the first rank that is lost,
    by its death or because a collective ran out of time, ends them all; the call that was under
    way, and every later one, raises LearnerLostError until `restart`.
    """

    def __init__(self, run: RunConfig) -> None:
        self._config = run.learner
        self._ranks: list[ActorHandle] = []

    async def start(self, spec: LearnerSpec, weights: WeightStoreConfig) -> None:
        """Nothing; the ranks have met and hold the model.

        Raises:
            LearnerLostError: a rank died over it.
        """
        self._spec, self._weights = spec, weights
        config = self._config
        actor_class = ray.remote(num_cpus=0, num_gpus=config.num_gpus_per_rank)(LearnerActor)
        self._ranks = [
            actor_class.remote(rank, config.num_threads) for rank in range(config.num_ranks)
        ]
        [address] = await self._call("rendezvous", self._ranks[:1])
        await self._all("start", address, len(self._ranks), spec, weights)

    async def restart(self, learner_folder: Path | None) -> None:
        """Nothing; new ranks have met, and continue from a checkpoint or from the first model."""
        self._end_ranks()
        await self.start(self._spec, self._weights)
        if learner_folder is not None:
            await self.load(learner_folder)

    async def train_step(self, batch: Batch, coefficients: Coefficients) -> StepMetrics:
        """What the step did."""
        # Put once: the ranks of a machine map the same memory.
        reference = ray.put(batch)
        return await self._all("train_step", reference, coefficients)

    async def publish(self, version: int, canary: CanaryPrompt) -> PublishedWeights:
        """The version, fetchable."""
        return await self._all("publish", version, canary)

    async def answer_logprobs(self, prompts: Sequence[CanaryPrompt]) -> list[list[float]]:
        """The log-probs of each prompt's completion under the policy."""
        return await self._all("answer_logprobs", list(prompts))

    async def save(self, state_folder: Path, model_folder: Path) -> None:
        """Nothing; writes the learner's state, and the model as a Hugging Face folder."""
        await self._all("save", state_folder.absolute(), model_folder.absolute())

    async def load(self, folder: Path) -> None:
        """Nothing; continues from a checkpoint."""
        await self._all("load", folder.absolute())

    def close(self) -> None:
        """Nothing; ends the ranks, with what they do."""
        self._end_ranks()

    async def _all(self, method: str, *args: object) -> Any:
        """Rank 0's answer to a call of all ranks."""
        return (await self._call(method, self._ranks, *args))[0]

    async def _call(self, method: str, ranks: Sequence[ActorHandle], *args: object) -> list[Any]:
        if not ranks:
            raise LearnerLostError("the learner's ranks were lost and have not been restarted")
        calls = [asyncio.ensure_future(getattr(rank, method).remote(*args)) for rank in ranks]
        try:
            return await _all_or_first_failure(calls)
        except ray.exceptions.RayActorError as error:
            self._end_ranks()
            raise LearnerLostError(
                f"a learner rank died in '{method}': {reason_of(error)}"
            ) from error
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, LearnerLostError):
                raise
            self._end_ranks()
            raise error.cause from None
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank)


async def _all_or_first_failure(calls: Sequence[asyncio.Future[Any]]) -> list[Any]:
    """All answers; the first failure does not wait for calls that may never end."""
    await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
    for call in calls:
        if call.done():
            call.result()
    return [call.result() for call in calls]


def reason_of(error: ray.exceptions.RayError) -> str:
    """Why an actor died, in one line and without the advice that Ray gives for every death."""
    return " ".join(str(error).split()).partition(" Some common causes include")[0]

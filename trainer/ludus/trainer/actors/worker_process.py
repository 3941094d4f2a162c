"""One rollout worker as the driver sees it: an actor, from its start to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle

from ludus.proto.errors import EngineLostError, WeightSyncError
from ludus.trainer.actors.deaths import reason_of
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.processes import Slot
from ludus.trainer.actors.rollout_worker import RolloutWorkerActor, RolloutWorkerSpec
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.rollout.engines.vllm_process import vllm_environment
from ludus.trainer.weights import WorkerWeights

LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, EngineLostError)
"""What a call raises whose worker, or its engine or its machine, is no more."""

_NUM_SLOTS = 16
"""Into which a worker's groups are divided: while one ends, the others fill its batch."""

_SIGN_OF_LIFE_EVERY_S = 15.0
_SIGN_OF_LIFE_TIMEOUT_S = 60.0
_TICK_S = 1.0
_GRACE_S = 5.0
"""A store that gives up by itself says more about why than can be said here."""


@dataclass(eq=False, slots=True)
class WorkerProcess:
    """One actor of a worker, and what it does now."""

    number: int
    actor: ActorHandle
    max_groups: int
    """Groups that it plays at once."""
    slot_size: int
    """Groups of a slot, where so many are free."""
    num_groups: int = 0
    """Groups for which it has given slots."""
    node: str | None = None
    """The id of its node, once it has started."""
    num_played: int = 0
    """Groups that it has played, and that wait to be trained on."""
    num_evaluating: int = 0
    """Calls under way that play games of an evaluation."""
    held: WorkerWeights | None = None
    """What it samples from; None where that is not known."""
    refusals: list[WeightSyncError] = field(default_factory=list)
    """Why it did not come to hold what it was to hold, since it last did."""
    refused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it is out of traffic for that."""

    @classmethod
    def start(cls, spec: RolloutWorkerSpec, placement: Placement, number: int) -> WorkerProcess:
        """A process that asks Ray for room, and waits there for its first call."""
        actor = make_actor(spec, placement)
        most = spec.run.rollout.num_groups_in_flight
        # A rollout function that plays many groups in one call gets all that there are.
        in_batches = any(one.plays_in_batches for one in spec.run.environments.values())
        return cls(number, actor, most, most if in_batches else -(-most // _NUM_SLOTS))

    @property
    def num_free(self) -> int:
        """Groups that may begin on it."""
        return self.max_groups - self.num_groups

    @property
    def is_idle(self) -> bool:
        """True while it plays nothing."""
        return self.num_groups == 0 and self.num_evaluating == 0

    def take_slot(self) -> Slot:
        """A slot of what is free, which must be something."""
        size = min(self.slot_size, self.num_free)
        self.num_groups += size
        return Slot(self, size)

    def holds(self, published: PublishedWeights) -> bool:
        """Whether it samples from these weights."""
        manifest, held = published.manifest, self.held
        return held is not None and (held.version, held.content_hash) == (
            manifest.version,
            manifest.content_hash,
        )

    async def load(self, published: PublishedWeights, timeout_s: float) -> WorkerWeights:
        """What it says that it holds now; from scratch where it is not known what it held.

        Raises:
            WeightSyncError: it does not hold the weights, or not in time.
        """
        manifest = published.manifest
        what = f"weights version {manifest.version} ({manifest.num_bytes} bytes)"
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                from_scratch = self.held is None
                return await self.actor.load_weights.remote(published, from_scratch)
        except TimeoutError:
            raise WeightSyncError(
                f"{what} did not reach rollout worker {self.number} within weights.timeout_s = "
                f"{timeout_s:g}; raise it, or see trainer.log for what the worker does"
            ) from None
        except EngineLostError:
            raise
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, WeightSyncError):
                raise error.cause from error
            raise WeightSyncError(
                f"rollout worker {self.number} cannot load {what}: {reason_of(error)}"
            ) from error

    async def watch(self) -> str | None:
        """Why the worker must be replaced, as soon as it must; None once it was closed.

        A process that dies, or whose engine has failed, fails the call that waits for its end.
        One that is frozen, or whose event loop hangs, does nothing at all, so it is asked for a
        sign of life.
        """
        closed = asyncio.ensure_future(self.actor.until_closed.remote())
        try:
            while True:
                await asyncio.wait([closed], timeout=_SIGN_OF_LIFE_EVERY_S)
                if closed.done():
                    return closed.result()
                if not await self._is_alive():
                    return f"it gave no sign of life for {_SIGN_OF_LIFE_TIMEOUT_S:g} s"
        finally:
            closed.cancel()

    async def _is_alive(self) -> bool:
        """Whether it gives a sign of life in time.

        The time is counted in turns of this event loop: a driver that stood still has heard
        nothing, and the silence was its own.
        """
        sign = asyncio.ensure_future(self.actor.sign_of_life.remote())
        try:
            for _ in range(round(_SIGN_OF_LIFE_TIMEOUT_S / _TICK_S)):
                await asyncio.wait([sign], timeout=_TICK_S)
                if sign.done():
                    sign.result()
                    return True
            return False
        finally:
            sign.cancel()

    def kill(self) -> None:
        """End the process at once."""
        ray.kill(self.actor)


def make_actor(spec: RolloutWorkerSpec, placement: Placement) -> ActorHandle:
    """The actor of a worker, for which Ray finds room."""
    rollout = spec.run.rollout
    # Engines read their environment when Python starts, before any code of ours.
    environment = vllm_environment(rollout.num_threads, on_gpu=rollout.num_gpus_per_worker > 0)
    worker_class = ray.remote(
        **placement.of_worker(),
        runtime_env={"env_vars": environment},
    )(RolloutWorkerActor)
    return worker_class.remote(rollout.num_threads)

"""The driver's handle of a rollout worker's process, from its start to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle

from ludus.proto.errors import EngineLostError, WeightSyncError
from ludus.trainer.actors.failure_text import describe_failure
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.processes import Slot
from ludus.trainer.actors.rollout_worker import RolloutWorkerActor, RolloutWorkerSpec
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.rollout.engines.vllm_process import vllm_environment
from ludus.trainer.weights import WorkerWeights

LOST_ERRORS = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, EngineLostError)
"""Errors of a call whose worker, engine or machine is lost."""

_NUM_SLOTS = 16
"""Number of slots that share a worker's groups: when one ends, the others fill the batch."""

PING_INTERVAL_S = 15.0
PING_TIMEOUT_S = 60.0
TICK_S = 1.0
_GRACE_S = 5.0
"""Extra time for a store to raise its own error, which explains more."""


@dataclass(eq=False, slots=True)
class RolloutWorkerHandle:
    """One process of a rollout worker, and its current work."""

    number: int
    actor: ActorHandle
    max_groups: int
    """Maximum number of groups that the worker plays at the same time."""
    slot_size: int
    """Number of groups of a slot, if enough are free."""
    num_groups: int = 0
    """Number of groups in acquired slots."""
    node: str | None = None
    """Id of the worker's node; None until the worker has started."""
    num_played: int = 0
    """Number of groups that were played and accepted by the buffer."""
    num_evaluating: int = 0
    """Number of running calls that play evaluation episodes."""
    weights: WorkerWeights | None = None
    """Current weights of the worker; None if unknown."""
    load_errors: list[WeightSyncError] = field(default_factory=list)
    """Errors of failed loads since the last successful load."""
    out_of_traffic: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the worker gets no groups because a load has failed."""

    @classmethod
    def start(
        cls, spec: RolloutWorkerSpec, placement: Placement, number: int
    ) -> RolloutWorkerHandle:
        """Start a process; it waits in Ray for room, and then for its first call."""
        actor = make_actor(spec, placement)
        max_groups = spec.run.rollout.num_groups_in_flight
        # A rollout function that plays many groups in one call gets all groups in one slot.
        in_batches = any(each.plays_in_batches for each in spec.run.environments.values())
        slot_size = max_groups if in_batches else -(-max_groups // _NUM_SLOTS)
        return cls(number, actor, max_groups, slot_size)

    @property
    def num_free(self) -> int:
        """Number of groups that may start on the worker."""
        return self.max_groups - self.num_groups

    @property
    def is_idle(self) -> bool:
        """True while the worker plays nothing."""
        return self.num_groups == 0 and self.num_evaluating == 0

    def acquire_slot(self) -> Slot:
        """Acquire a slot of the free groups; there must be at least one."""
        size = min(self.slot_size, self.num_free)
        self.num_groups += size
        return Slot(self, size)

    def has_weights(self, published: PublishedWeights) -> bool:
        """Return whether the worker samples from these weights."""
        manifest, weights = published.manifest, self.weights
        return weights is not None and (weights.version, weights.content_hash) == (
            manifest.version,
            manifest.content_hash,
        )

    async def load(self, published: PublishedWeights, timeout_s: float) -> WorkerWeights:
        """Load weights, from scratch if the current weights are unknown, and return them.

        Raises:
            WeightSyncError: the worker did not load the weights in time.
        """
        manifest = published.manifest
        description = f"weights version {manifest.version} ({manifest.num_bytes} bytes)"
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                from_scratch = self.weights is None
                return await self.actor.load_weights.remote(published, from_scratch)
        except TimeoutError:
            raise WeightSyncError(
                f"{description} did not reach rollout worker {self.number} within "
                f"weights.timeout_s = {timeout_s:g}; raise the limit, or see trainer.log for the "
                "worker's activity"
            ) from None
        except EngineLostError:
            raise
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, WeightSyncError):
                raise error.cause from error
            raise WeightSyncError(
                f"rollout worker {self.number} cannot load {description}: {describe_failure(error)}"
            ) from error

    async def watch(self) -> str | None:
        """Wait until the worker must be replaced and return the reason; None if it was closed.

        If the process dies, or its engine fails, the call that waits for its end fails. A process
        that is frozen, or whose event loop hangs, does nothing at all, so it is pinged.
        """
        closed = asyncio.ensure_future(self.actor.wait_until_closed.remote())
        try:
            while True:
                await asyncio.wait([closed], timeout=PING_INTERVAL_S)
                if closed.done():
                    return closed.result()
                if not await self._responds():
                    return f"it did not respond for {PING_TIMEOUT_S:g} s"
        finally:
            closed.cancel()

    async def _responds(self) -> bool:
        """Return whether the worker responds to a ping in time.

        The time is counted in turns of this event loop, because a driver that was suspended
        itself received no responses.
        """
        ping = asyncio.ensure_future(self.actor.ping.remote())
        try:
            for _ in range(round(PING_TIMEOUT_S / TICK_S)):
                await asyncio.wait([ping], timeout=TICK_S)
                if ping.done():
                    ping.result()
                    return True
            return False
        finally:
            ping.cancel()

    def kill(self) -> None:
        """Kill the process."""
        ray.kill(self.actor)


def make_actor(spec: RolloutWorkerSpec, placement: Placement) -> ActorHandle:
    """Create the actor of a worker, which Ray starts when there is room."""
    rollout = spec.run.rollout
    # Engines read their environment variables when Python starts, before any code of Ludus.
    environment = vllm_environment(rollout.num_threads, on_gpu=rollout.num_gpus_per_worker > 0)
    worker_class = ray.remote(
        **placement.worker_options(),
        runtime_env={"env_vars": environment},
    )(RolloutWorkerActor)
    return worker_class.remote(rollout.num_threads)

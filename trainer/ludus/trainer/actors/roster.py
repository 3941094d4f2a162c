"""The processes of all rollout workers: which may play, and which weights they need.

    started ---> ready ---------------> ended
                   |   ^
      failed load  v   |  successful load of the newest weights
                out of traffic

A worker goes out of traffic if it did not load the weights: it fetched them too slowly or
incompletely, or its canary log-probs differ from the learner's. Callers wait for changes with
`wait_until`, which also raises a failure that ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle

from ludus.proto.errors import CanaryError, EngineLostError, WeightSyncError
from ludus.trainer.actors.cluster import describe_failure
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.rollout_worker import RolloutWorkerActor, RolloutWorkerSpec
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.rollout.engines.vllm_process import vllm_environment
from ludus.trainer.weights.canary import CanaryJudge, WorkerWeights

_log = logging.getLogger(__name__)

LOST_ERRORS = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, EngineLostError)
"""Errors of a call whose worker, engine or machine is lost."""

_MAX_DESCRIBED = 4
"""Maximum number of workers that a description lists."""

_NUM_SLOTS = 16
"""Number of slots that share a worker's groups: when one ends, the others fill the batch."""

PING_INTERVAL_S = 15.0
PING_TIMEOUT_S = 60.0
TICK_S = 1.0
GRACE_S = 5.0
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

    def reserve(self) -> int:
        """Reserve the free groups of one slot, at least one, and return their number."""
        size = min(self.slot_size, self.num_free)
        self.num_groups += size
        return size

    def has_weights(self, published: PublishedWeights) -> bool:
        """Return whether the worker samples from these weights."""
        if self.weights is None:
            return False
        manifest, canary = published.manifest, self.weights.canary
        return (canary.version, canary.content_hash) == (manifest.version, manifest.content_hash)

    async def load(self, published: PublishedWeights, timeout_s: float) -> WorkerWeights:
        """Load weights, from scratch if the current weights are unknown, and return them.

        Raises:
            WeightSyncError: the worker did not load the weights in time.
        """
        manifest = published.manifest
        description = f"weights version {manifest.version} ({manifest.num_bytes} bytes)"
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
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


@dataclass(slots=True)
class Roster:
    """The processes of all rollout workers of a run."""

    judge: CanaryJudge
    ready: list[RolloutWorkerHandle] = field(default_factory=list)
    """Workers that may play."""
    started: list[RolloutWorkerHandle] = field(default_factory=list)
    """Workers that have started and not ended, ready or out of traffic."""
    newest: PublishedWeights | None = None
    """Weights that all workers should load."""
    delivery_error: WeightSyncError | None = None
    """Reason why no worker loaded the newest weights."""
    failure: BaseException | None = None
    """Failure that ends the run."""
    num_restarts: int = 0
    num_breaches: int = 0
    breaches_in_a_row: Counter[int] = field(default_factory=Counter)
    """Consecutive canary breaches of each worker by its number, including replaced processes."""
    activities: dict[int, str] = field(default_factory=dict)
    """Activity of each worker before it is ready, by its number."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, published: PublishedWeights) -> None:
        """Set the weights that all workers should load."""
        self.newest, self.delivery_error = published, None
        self.notify()

    def mark_ready(self, worker: RolloutWorkerHandle) -> None:
        """Let the worker play."""
        worker.out_of_traffic.clear()
        self.ready.append(worker)
        _log.info(
            "rollout worker %d ready (%d of %d)",
            worker.number,
            len(self.ready),
            len(self.activities),
        )
        self.notify()

    def remove(self, worker: RolloutWorkerHandle) -> None:
        """Stop giving slots of the worker."""
        if worker in self.ready:
            self.ready.remove(worker)
            self.notify()

    def end(self, worker: RolloutWorkerHandle) -> None:
        """Remove the worker, and kill its process."""
        self.remove(worker)
        self.started = [other for other in self.started if other is not worker]
        worker.kill()

    def describe(self) -> str:
        """Describe how many workers are ready, and the activity of each."""
        playing = {worker.number: worker.num_groups for worker in self.ready}
        parts = [
            f"; worker {number} {activity}"
            for number, activity in sorted(self.activities.items())
            if number not in playing
        ]
        parts += [f"; worker {number} plays {num} groups" for number, num in playing.items()]
        rest = "; ..." if len(parts) > _MAX_DESCRIBED else ""
        ready = f"{len(playing)} of {len(self.activities)} rollout workers ready"
        return "".join([ready, *parts[:_MAX_DESCRIBED], rest])

    async def load(
        self, worker: RolloutWorkerHandle, published: PublishedWeights, timeout_s: float
    ) -> WorkerWeights | None:
        """Load weights on a worker; return None if it failed and is now out of traffic.

        Raises one of LOST_ERRORS if its process has ended.
        """
        if worker.has_weights(published):
            return worker.weights
        try:
            weights = await worker.load(published, timeout_s)
            self.judge.check(weights.canary, worker.number)
        except WeightSyncError as error:
            self._take_out_of_traffic(worker, error)
            return None
        worker.weights = weights
        worker.load_errors.clear()
        self.breaches_in_a_row.pop(worker.number, None)
        return weights

    def _take_out_of_traffic(self, worker: RolloutWorkerHandle, error: WeightSyncError) -> None:
        _log.warning("rollout worker %d removed from rotation: %s", worker.number, error)
        self.remove(worker)
        worker.weights = None
        worker.load_errors.append(error)
        worker.out_of_traffic.set()
        if isinstance(error, CanaryError):
            self.num_breaches += 1
            self.breaches_in_a_row[worker.number] += 1
            # The weights that sample its running groups are unknown.
            worker.actor.abandon.remote()

    def notify(self) -> None:
        """Wake all callers that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true; it is checked after each change.

        Raises the failure that ends the run.
        """
        while self.failure is None and not condition():
            await self.wait_for_change()
        if self.failure is not None:
            raise self.failure

"""The processes of all rollout workers: which may play, and which weights they need.

    started ---> ready ---------------> ended
                   |   ^
      failed load  v   |  successful load of the newest weights
                out of rotation

A worker goes out of rotation if it did not load the weights: it fetched them too slowly or
incompletely, or its canary log-probs differ from the learner's. Callers wait for changes with
`wait_until`, which also raises the failure that ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import ray
from ray.actor import ActorHandle

from ludus.proto.errors import CanaryError, EngineLostError, WeightSyncError
from ludus.trainer.actors.cluster import describe_failure
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.rollout_worker import RolloutWorkerActor, RolloutWorkerSpec
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.rollout.engines.vllm_process import make_vllm_variables
from ludus.trainer.weights.canary import CanaryJudge, WorkerWeights

_log = logging.getLogger(__name__)

LOST_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OutOfMemoryError,
    EngineLostError,
)
"""Errors of a call whose worker, engine or machine is lost. Ray kills the process that uses the
most memory before a machine has none left."""

_MAX_DESCRIBED = 4
"""Maximum number of workers that a description lists."""

_NUM_SLOTS = 16
"""Number of slots of a worker. When one slot ends, the groups of the other slots continue."""

PING_INTERVAL_S = 15.0
PING_TIMEOUT_S = 60.0
PING_POLL_S = 1.0
LOAD_GRACE_S = 5.0
"""Extra time in which the store may raise its own, more exact error."""


@dataclass(eq=False, slots=True)
class RolloutWorkerHandle:
    """One process of a rollout worker, and its current work."""

    number: int
    actor: ActorHandle
    max_groups: int
    """Maximum number of groups that the worker plays at the same time."""
    slot_size: int
    """Maximum number of groups of a slot."""
    num_groups: int = 0
    """Number of groups in acquired slots."""
    node_id: str | None = None
    """Id of the worker's node; None until the worker has started."""
    num_played_groups: int = 0
    """Number of groups that were played and accepted by the buffer."""
    num_evaluations: int = 0
    """Number of running calls that play evaluation episodes."""
    weights: WorkerWeights | None = None
    """Current weights of the worker; None if unknown."""
    load_errors: list[WeightSyncError] = field(default_factory=list)
    """Errors of failed loads since the last successful load."""
    removal_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the worker is out of rotation: it gets no groups, because a load has failed."""

    @classmethod
    def start(cls, spec: RolloutWorkerSpec, placement: Placement, number: int) -> Self:
        """Start a process, which Ray creates when there is room, and return its handle."""
        slot_size = max_groups = spec.run.rollout.num_groups_in_flight
        # A rollout function that plays many groups in one call gets all groups in one slot.
        if not any(config.plays_in_batches for config in spec.run.environments.values()):
            slot_size = -(-max_groups // _NUM_SLOTS)
        return cls(number, make_actor(spec, placement), max_groups, slot_size)

    @property
    def num_free_groups(self) -> int:
        """Number of groups that may start on the worker."""
        return self.max_groups - self.num_groups

    @property
    def is_idle(self) -> bool:
        """True while the worker plays nothing."""
        return self.num_groups == 0 and self.num_evaluations == 0

    def reserve(self) -> int:
        """Reserve the free groups of one slot, at least one, and return their number."""
        size = min(self.slot_size, self.num_free_groups)
        self.num_groups += size
        return size

    def has_weights(self, published_weights: PublishedWeights) -> bool:
        """Return whether the worker has loaded these weights."""
        if self.weights is None:
            return False
        manifest, canary = published_weights.manifest, self.weights.canary
        return (canary.version, canary.content_hash) == (manifest.version, manifest.content_hash)

    async def load(self, published_weights: PublishedWeights, timeout_s: float) -> WorkerWeights:
        """Load weights and return them; if the current weights are unknown, load from scratch.

        Raises:
            WeightSyncError: the worker did not load the weights in time.
        """
        manifest = published_weights.manifest
        description = f"weights version {manifest.version} ({manifest.num_bytes} bytes)"
        try:
            async with asyncio.timeout(timeout_s + LOAD_GRACE_S):
                is_from_scratch = self.weights is None
                return await self.actor.load_weights.remote(published_weights, is_from_scratch)
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

        If the process dies, or its engine fails, the call of `wait_until_closed` fails. A process
        that hangs does not fail, so it is also pinged.
        """
        close_call = asyncio.ensure_future(self.actor.wait_until_closed.remote())
        try:
            while True:
                await asyncio.wait([close_call], timeout=PING_INTERVAL_S)
                if close_call.done():
                    return close_call.result()
                if not await self._responds():
                    return f"it did not respond for {PING_TIMEOUT_S:g} s"
        finally:
            close_call.cancel()

    async def _responds(self) -> bool:
        """Return whether the worker responds to a ping in time.

        The time is counted in short waits of this event loop. A clock would also count time in
        which the driver itself was suspended and received no responses.
        """
        ping_call = asyncio.ensure_future(self.actor.ping.remote())
        try:
            for _ in range(round(PING_TIMEOUT_S / PING_POLL_S)):
                await asyncio.wait([ping_call], timeout=PING_POLL_S)
                if ping_call.done():
                    ping_call.result()
                    return True
            return False
        finally:
            ping_call.cancel()

    def kill(self) -> None:
        """Kill the process."""
        ray.kill(self.actor)


def make_actor(spec: RolloutWorkerSpec, placement: Placement) -> ActorHandle:
    """Create the actor of a worker, which Ray starts when there is room."""
    rollout, options = spec.run.rollout, placement.make_worker_options()
    # Engines read their environment variables when Python starts, before any code of Ludus.
    variables = make_vllm_variables(
        rollout.known_num_threads, uses_gpu=rollout.num_gpus_per_worker > 0
    )
    worker_class = ray.remote(**options, runtime_env={"env_vars": variables})(RolloutWorkerActor)
    return worker_class.remote(rollout.known_num_threads)


@dataclass(slots=True)
class Roster:
    """The processes of all rollout workers of a run."""

    judge: CanaryJudge
    ready_workers: list[RolloutWorkerHandle] = field(default_factory=list)
    """Workers that may play."""
    started_workers: list[RolloutWorkerHandle] = field(default_factory=list)
    """Workers that have started and not ended, ready or out of rotation."""
    newest_weights: PublishedWeights | None = None
    """Weights that all workers should load."""
    delivery_error: WeightSyncError | None = None
    """Reason why no worker loaded the newest weights."""
    failure: BaseException | None = None
    """Failure that ends the run."""
    num_restarts: int = 0
    num_breaches: int = 0
    breaches_in_a_row: Counter[int] = field(default_factory=Counter)
    """Number of consecutive canary breaches by worker number, including replaced processes."""
    activities: dict[int, str] = field(default_factory=dict)
    """Activity of each worker before it is ready, by its number."""
    _change_event: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, published_weights: PublishedWeights) -> None:
        """Set the weights that all workers should load."""
        self.newest_weights, self.delivery_error = published_weights, None
        self.notify()

    def mark_ready(self, worker: RolloutWorkerHandle) -> None:
        """Let the worker play."""
        worker.removal_event.clear()
        self.ready_workers.append(worker)
        num_ready, num_workers = len(self.ready_workers), len(self.activities)
        _log.info("rollout worker %d ready (%d of %d)", worker.number, num_ready, num_workers)
        self.notify()

    def remove(self, worker: RolloutWorkerHandle) -> None:
        """Stop giving out slots of the worker."""
        if worker in self.ready_workers:
            self.ready_workers.remove(worker)
            self.notify()

    def kill(self, worker: RolloutWorkerHandle) -> None:
        """Remove the worker, and kill its process."""
        self.remove(worker)
        if worker in self.started_workers:
            self.started_workers.remove(worker)
        worker.kill()

    def describe(self) -> str:
        """Describe the number of ready workers, and the activity of each worker."""
        texts = {number: f"worker {number} {text}" for number, text in self.activities.items()}
        for worker in self.ready_workers:
            texts[worker.number] = f"worker {worker.number} plays {worker.num_groups} groups"
        ready_numbers = {worker.number for worker in self.ready_workers}
        numbers = sorted(texts, key=lambda number: (number in ready_numbers, number))
        parts = [f"{len(ready_numbers)} of {len(self.activities)} rollout workers ready"]
        parts += [texts[number] for number in numbers[:_MAX_DESCRIBED]]
        return "; ".join([*parts, "..."] if len(numbers) > _MAX_DESCRIBED else parts)

    async def load(
        self, worker: RolloutWorkerHandle, published_weights: PublishedWeights, timeout_s: float
    ) -> WorkerWeights | None:
        """Load weights on a worker; return None if it failed and is now out of rotation.

        Raises one of LOST_ERRORS if its process has ended.
        """
        if worker.has_weights(published_weights):
            return worker.weights
        try:
            weights = await worker.load(published_weights, timeout_s)
            self.judge.check(weights.canary, worker.number)
        except WeightSyncError as error:
            self._take_out_of_rotation(worker, error)
            return None
        worker.weights = weights
        worker.load_errors.clear()
        self.breaches_in_a_row.pop(worker.number, None)
        return weights

    def _take_out_of_rotation(self, worker: RolloutWorkerHandle, error: WeightSyncError) -> None:
        _log.warning("rollout worker %d removed from rotation: %s", worker.number, error)
        self.remove(worker)
        worker.weights = None
        worker.load_errors.append(error)
        worker.removal_event.set()
        if isinstance(error, CanaryError):
            self.num_breaches += 1
            self.breaches_in_a_row[worker.number] += 1
            # It is unknown which weights sample the worker's running groups.
            worker.actor.abandon.remote()

    def notify(self) -> None:
        """Wake all callers that wait for a change."""
        self._change_event.set()
        self._change_event = asyncio.Event()

    async def wait_for_change(self) -> None:
        """Wait for the next change."""
        await self._change_event.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true; it is checked after each change.

        Raises the failure that ends the run.
        """
        while self.failure is None and not condition():
            await self.wait_for_change()
        if self.failure is not None:
            raise self.failure

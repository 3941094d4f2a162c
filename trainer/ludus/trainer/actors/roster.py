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

from ludus.proto.errors import CanaryError, WeightSyncError
from ludus.trainer.actors.worker_handle import RolloutWorkerHandle
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.weights import CanaryJudge, WorkerWeights

_log = logging.getLogger(__name__)

_MAX_DESCRIBED = 4
"""Maximum number of workers that a description lists."""


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
    num_joined: int = 0
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
        if not worker.out_of_traffic.is_set():
            self.num_joined += 1
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

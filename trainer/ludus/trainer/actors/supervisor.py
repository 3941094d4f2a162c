"""Supervision of one rollout worker: start, newest weights, and replacement of its process.

    start an actor      (waits for room in Ray without a limit; then there is a limit)
          |
    fetch the newest weights, canary  <------------------+
          |                                              |
        ready --- first failed load ---> from scratch ---+
          |       second: replaced if other workers can load, otherwise the run ends
          |
          +-- process died, does not respond, or its engine failed: replaced
          |
        closed

A replacement starts after a pause. The pause doubles each time a process ends before it played
anything. After three such ends in a row, the run ends if fewer than rollout.min_workers are ready.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

import ray

from ludus.proto.errors import CanaryError, EngineLostError, UserError, WorkerStartError
from ludus.trainer.actors.cluster import describe_failure
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.roster import RolloutWorkerHandle, Roster
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.tasks import TimeLimitError, wait_with_limit

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
_MAX_FAILED_STARTS = 3
_MAX_DOUBLINGS = 6
_ROOM_LOG_DELAY_S = 60.0
_MAX_FAILED_LOADS = 2
"""Maximum number of consecutive failed loads of a process; the second load is from scratch."""


class _UnfitError(Exception):
    """The process did not start in time, or cannot load weights that others can."""


@dataclass(frozen=True, slots=True)
class Supervisor:
    """A supervisor that keeps one rollout worker running."""

    number: int
    spec: RolloutWorkerSpec
    placement: Placement
    roster: Roster

    async def run(self) -> None:
        """Run a process of the worker until it is closed, and replace it whenever it ends.

        Raises:
            UserError: the worker cannot work as configured.
            WorkerStartError: the worker does not start, and too few other workers are ready.
            WeightSyncError: no worker loads the newest weights.
        """
        rollout, num_failures = self.spec.run.rollout, 0
        try:
            while True:
                worker = RolloutWorkerHandle.start(self.spec, self.placement, self.number)
                try:
                    reason = await self._run_process(worker)
                finally:
                    self.roster.kill(worker)
                if reason is None:
                    return
                num_failures = 0 if worker.num_played_groups else num_failures + 1
                num_ready, min_workers = len(self.roster.ready_workers), rollout.min_workers
                if num_failures >= _MAX_FAILED_STARTS and num_ready < min_workers:
                    raise WorkerStartError(
                        f"rollout worker {self.number} ended {num_failures} times in a row before "
                        f"it played anything: {reason}; see trainer.log, and check that the "
                        "machine has enough memory for the model"
                    )
                self.roster.num_restarts += 1
                self.roster.activities[self.number] = f"is about to restart: {reason}"
                _log.warning("rollout worker %d ended (%s); starting another", self.number, reason)
                await asyncio.sleep(FIRST_PAUSE_S * (2 ** min(num_failures, _MAX_DOUBLINGS) - 1))
        finally:
            self.roster.activities.pop(self.number, None)

    async def _run_process(self, worker: RolloutWorkerHandle) -> str | None:
        """Return the reason why the process must be replaced; None if it was closed."""
        try:
            await self._start(worker)
            return await self._keep_ready(worker)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from error
            _log.exception("rollout worker %d has failed", self.number)
            return describe_failure(error)
        except (ray.exceptions.RayError, EngineLostError, _UnfitError) as error:
            return describe_failure(error)

    async def _start(self, worker: RolloutWorkerHandle) -> None:
        """Start the process. The time limit counts from when there is room.

        Raises:
            _UnfitError: the start takes too long.
        """
        spec, activities = replace(self.spec, number=self.number), self.roster.activities
        activities[self.number] = "waits for room"
        room_call = asyncio.ensure_future(worker.actor.ping.remote())
        try:
            await asyncio.wait([room_call], timeout=_ROOM_LOG_DELAY_S)
            if not room_call.done():
                _log.info("rollout worker %d waits for room", self.number)
            await room_call
        finally:  # If the run ends meanwhile, the actor is killed; its error must be retrieved.
            room_call.cancel()
            await asyncio.gather(room_call, return_exceptions=True)
        activities[self.number] = "loads the model and builds its engine"
        try:
            worker.node_id = await wait_with_limit(
                worker.actor.start.remote(spec),
                f"rollout worker {self.number} to load the model and to build its engine",
                timeout_s=spec.run.placement.start_timeout_s,
                setting="placement.start_timeout_s",
            )
        except TimeLimitError as error:
            raise _UnfitError(str(error)) from None
        self.roster.started_workers.append(worker)

    async def _keep_ready(self, worker: RolloutWorkerHandle) -> str | None:
        """Load weights whenever the worker is out of rotation, until `watch` returns."""
        watch_task = asyncio.ensure_future(worker.watch())
        try:
            while not watch_task.done():
                await self._load_newest(worker)
                removal_task = asyncio.ensure_future(worker.removal_event.wait())
                await asyncio.wait([watch_task, removal_task], return_when=asyncio.FIRST_COMPLETED)
                removal_task.cancel()
            return watch_task.result()
        finally:
            watch_task.cancel()
            await asyncio.gather(watch_task, return_exceptions=True)

    async def _load_newest(self, worker: RolloutWorkerHandle) -> None:
        """Load the newest weights, and mark the worker ready."""
        timeout_s = self.spec.run.weights.timeout_s
        while (newest_weights := self.roster.newest_weights) is not None:
            self.roster.activities[self.number] = "fetches the newest weights"
            if worker.load_errors:
                self.roster.activities[self.number] += f" again: {worker.load_errors[-1]}"
                await self._wait_before_retry(worker, newest_weights)
            weights = await self.roster.load(worker, newest_weights, timeout_s)
            if weights is not None and newest_weights is self.roster.newest_weights:
                break
        self.roster.mark_ready(worker)

    async def _wait_before_retry(
        self, worker: RolloutWorkerHandle, failed_weights: PublishedWeights
    ) -> None:
        """Wait until a worker whose load failed may try again.

        Raises:
            _UnfitError: the process must be replaced.
            WeightSyncError: no worker can load weights, so the run must end.
        """
        error, max_breaches = worker.load_errors[-1], self.spec.run.weights.canary.max_breaches
        num_breaches = self.roster.breaches_in_a_row[self.number]
        if isinstance(error, CanaryError) and num_breaches >= max_breaches:
            raise CanaryError(
                f"{error}; that is {num_breaches} in a row, and weights.canary.max_breaches = "
                f"{max_breaches}"
            )
        if len(worker.load_errors) < _MAX_FAILED_LOADS:
            return
        peers = [peer for peer in self.roster.started_workers if peer is not worker]
        if any(len(peer.load_errors) < _MAX_FAILED_LOADS for peer in peers):
            raise _UnfitError(str(error))
        if isinstance(error, CanaryError):
            raise CanaryError(f"{error}, nor does any other worker")
        # Weights may be lost with the learner that published them. The restarted learner publishes
        # again.
        self.roster.delivery_error = error
        self.roster.notify()
        try:
            async with asyncio.timeout(self.spec.run.weights.timeout_s):
                while self.roster.newest_weights is failed_weights:
                    await self.roster.wait_for_change()
        except TimeoutError:
            raise error from None
        worker.load_errors.clear()

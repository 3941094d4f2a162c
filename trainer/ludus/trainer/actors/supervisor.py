"""Keeps one rollout worker there, with the newest weights, and replaces its process when it ends.

    start an actor      (waits for room in Ray, as long as it takes; then there is a limit)
          |
    fetch the newest weights, canary  <------------------+
          |                                              |
        ready --- refused, once ---> from scratch -------+
          |                  again: replaced where others hold them, else the run ends
          |
          +-- dead, silent, its engine has failed: replaced
          |
        closed

Another process starts after a pause, which doubles while none plays anything. Three such ends in
a row, with fewer than rollout.min_workers ready, end the run with their reason.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

import ray

from ludus.proto.errors import (
    CanaryError,
    EngineLostError,
    UserError,
    WeightSyncError,
    WorkerStartError,
)
from ludus.trainer.actors.deaths import reason_of
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.roster import Roster
from ludus.trainer.actors.worker_process import WorkerProcess
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.tasks import TimeLimitError, wait_with_limit

_log = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_FIRST_PAUSE_S = 1.0
_MAX_DOUBLINGS = 6
_SLOW_START_S = 60.0
_MAX_LOADS = 2
"""Times in a row that a process may fail to load weights, the second from scratch."""


class _UnfitError(Exception):
    """A process that does not start in time, or does not come to hold what others hold."""


@dataclass(frozen=True, slots=True)
class Supervisor:
    """Whoever sees to it that one worker is there."""

    number: int
    spec: RolloutWorkerSpec
    placement: Placement
    roster: Roster

    async def run(self) -> None:
        """Run a process of the worker until it is closed, and another one each time that it ends.

        Raises:
            UserError: it cannot work as configured.
            WorkerStartError: it does not start, and too few others are there.
            WeightSyncError: no worker comes to hold the newest weights.
        """
        try:
            await self._replace_until_closed()
        finally:
            self.roster.doing.pop(self.number, None)

    async def _replace_until_closed(self) -> None:
        num_failed = 0
        while True:
            worker = WorkerProcess.start(self.spec, self.placement, self.number)
            try:
                reason = await self._live(worker)
            finally:
                self.roster.end(worker)
            if reason is None:
                return
            num_failed = 0 if worker.num_played else num_failed + 1
            too_few = len(self.roster.ready) < self.spec.run.rollout.min_workers
            if num_failed >= _MAX_FAILED_STARTS and too_few:
                raise WorkerStartError(
                    f"rollout worker {self.number} ended {num_failed} times in a row before it "
                    f"had played anything: {reason}; see trainer.log, and whether the machine has "
                    "memory for the model"
                )
            self.roster.num_restarts += 1
            self.roster.doing[self.number] = f"is about to start again: {reason}"
            _log.warning("rollout worker %d ended (%s); starting another", self.number, reason)
            await asyncio.sleep(_FIRST_PAUSE_S * (2 ** min(num_failed, _MAX_DOUBLINGS) - 1))

    async def _live(self, worker: WorkerProcess) -> str | None:
        """Why the process must be replaced; None when it was closed."""
        try:
            await self._start(worker)
            return await self._keep_ready(worker)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from error
            _log.exception("rollout worker %d has failed", self.number)
            return reason_of(error)
        except (ray.exceptions.RayError, EngineLostError, _UnfitError) as error:
            return reason_of(error)

    async def _start(self, worker: WorkerProcess) -> None:
        """Start the process: its room may come as late as it will, the rest has a limit.

        Raises:
            _UnfitError: it takes too long.
        """
        doing, spec = self.roster.doing, replace(self.spec, number=self.number)
        doing[self.number] = "waits for room"
        has_room = asyncio.ensure_future(worker.actor.sign_of_life.remote())
        try:
            await asyncio.wait([has_room], timeout=_SLOW_START_S)
            if not has_room.done():
                _log.info("rollout worker %d waits for room", self.number)
            await has_room
        finally:  # a run that ends meanwhile kills the actor, and nobody would hear of it
            has_room.cancel()
            await asyncio.gather(has_room, return_exceptions=True)
        doing[self.number] = "loads the model and builds its engine"
        try:
            worker.node = await wait_with_limit(
                worker.actor.start.remote(spec),
                f"rollout worker {self.number} to load the model and to build its engine",
                timeout_s=spec.run.placement.start_timeout_s,
                setting="placement.start_timeout_s",
            )
        except TimeLimitError as error:
            raise _UnfitError(str(error)) from None
        self.roster.started.append(worker)

    async def _keep_ready(self, worker: WorkerProcess) -> str | None:
        """See to the worker's weights whenever it is refused, until `watch` tells of its end."""
        ended = asyncio.ensure_future(worker.watch())
        try:
            while not ended.done():
                await self._join(worker)
                refused = asyncio.ensure_future(worker.refused.wait())
                await asyncio.wait([ended, refused], return_when=asyncio.FIRST_COMPLETED)
                refused.cancel()
            return ended.result()
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    async def _join(self, worker: WorkerProcess) -> None:
        """Bring the newest weights to the worker, which is then ready."""
        timeout_s = self.spec.run.weights.timeout_s
        while (newest := self.roster.newest) is not None:
            self.roster.doing[self.number] = "fetches the newest weights"
            if worker.refusals:
                self.roster.doing[self.number] += f" once more: {worker.refusals[-1]}"
                await self._allow_another_load(worker, newest)
            held = await self.roster.load(worker, newest, timeout_s)
            if held is not None and newest is self.roster.newest:
                break
        self.roster.join(worker)

    async def _allow_another_load(self, worker: WorkerProcess, newest: PublishedWeights) -> None:
        """Return once a worker that was refused may load again.

        Raises:
            _UnfitError: another process must take its place.
            WeightSyncError: no worker came to hold weights, so the run must end.
        """
        error, max_breaches = worker.refusals[-1], self.spec.run.weights.canary.max_breaches
        num_breaches = self.roster.breaches_in_a_row[self.number]
        if isinstance(error, CanaryError) and num_breaches >= max_breaches:
            raise CanaryError(
                f"{error}; that is {num_breaches} in a row, and weights.canary.max_breaches = "
                f"{max_breaches}"
            )
        if len(worker.refusals) < _MAX_LOADS:
            return
        others = [other for other in self.roster.started if other is not worker]
        if any(len(other.refusals) < _MAX_LOADS for other in others):
            raise _UnfitError(str(error))
        if isinstance(error, CanaryError):
            raise CanaryError(f"{error}, nor does any other worker")
        await self._await_newer_than(newest, error)
        worker.refusals.clear()

    async def _await_newer_than(self, published: PublishedWeights, error: WeightSyncError) -> None:
        """Wait until other weights are to be fetched; raise `error` when none are in time.

        Weights may be gone with the learner that published them; its successor publishes again.
        """
        self.roster.undelivered = error
        self.roster.note_change()
        try:
            async with asyncio.timeout(self.spec.run.weights.timeout_s):
                while self.roster.newest is published:
                    await self.roster.change()
        except TimeoutError:
            raise error from None

"""Which processes of rollout workers there are, which of them may play, and what they should hold.

    started ---> ready ---------------> ended
                   |   ^
     refused: it   v   |  it holds the newest weights
                out of traffic

A worker is refused when it did not come to hold the weights that it was to hold: it fetched them
too slowly, or not whole, or answers the canary prompt otherwise than the learner. Whoever waits
for a change of all this does so in `until`, and is told of a failure that ends the run there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ludus.proto.errors import CanaryError, WeightSyncError
from ludus.trainer.actors.worker_process import WorkerProcess
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.weights import CanaryJudge, WorkerWeights

_log = logging.getLogger(__name__)

_MAX_TOLD = 4
"""Workers that a sentence tells of."""


@dataclass(slots=True)
class Roster:
    """The processes of all rollout workers of a run."""

    judge: CanaryJudge
    ready: list[WorkerProcess] = field(default_factory=list)
    """Those that may play."""
    started: list[WorkerProcess] = field(default_factory=list)
    """Those that have started and not ended, ready or refused."""
    newest: PublishedWeights | None = None
    """What all should hold."""
    undelivered: WeightSyncError | None = None
    """Why no worker at all came to hold the newest weights."""
    failure: BaseException | None = None
    """Why the run must end."""
    num_restarts: int = 0
    num_joined: int = 0
    num_breaches: int = 0
    breaches_in_a_row: Counter[int] = field(default_factory=Counter)
    """Of each worker by its number, the processes that took its place included."""
    doing: dict[int, str] = field(default_factory=dict)
    """What each worker that is wanted does before it is ready, by its number."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, published: PublishedWeights) -> None:
        """Want all workers to hold these weights."""
        self.newest, self.undelivered = published, None
        self.note_change()

    def join(self, worker: WorkerProcess) -> None:
        """Let the worker play."""
        if not worker.refused.is_set():
            self.num_joined += 1
        worker.refused.clear()
        self.ready.append(worker)
        _log.info("rollout worker %d is ready; %d are", worker.number, len(self.ready))
        self.note_change()

    def leave(self, worker: WorkerProcess) -> None:
        """Give the worker no more slots."""
        if worker in self.ready:
            self.ready.remove(worker)
            self.note_change()

    def end(self, worker: WorkerProcess) -> None:
        """Forget the worker, and end its process."""
        self.leave(worker)
        self.started = [other for other in self.started if other is not worker]
        worker.kill()

    def describe(self) -> str:
        """How many workers are ready, and what each does; those that are not stand first."""
        playing = {worker.number: worker.num_groups for worker in self.ready}
        told = [
            f"; worker {number} {what}"
            for number, what in sorted(self.doing.items())
            if number not in playing
        ]
        told += [f"; worker {number} plays {num} groups" for number, num in playing.items()]
        rest = "; ..." if len(told) > _MAX_TOLD else ""
        ready = f"{len(playing)} of {len(self.doing)} rollout workers ready"
        return "".join([ready, *told[:_MAX_TOLD], rest])

    async def load(
        self, worker: WorkerProcess, published: PublishedWeights, timeout_s: float
    ) -> WorkerWeights | None:
        """What the worker holds now: the published weights; None when it is refused.

        Raises one of LOST when its process has ended.
        """
        if worker.holds(published):
            return worker.held
        try:
            held = await worker.load(published, timeout_s)
            self.judge.check(held.canary, worker.number)
        except WeightSyncError as error:
            self._refuse(worker, error)
            return None
        worker.held = held
        worker.refusals.clear()
        self.breaches_in_a_row.pop(worker.number, None)
        return held

    def _refuse(self, worker: WorkerProcess, error: WeightSyncError) -> None:
        _log.warning("rollout worker %d is out of traffic: %s", worker.number, error)
        self.leave(worker)
        worker.held = None
        worker.refusals.append(error)
        worker.refused.set()
        if isinstance(error, CanaryError):
            self.num_breaches += 1
            self.breaches_in_a_row[worker.number] += 1
            # What it plays was sampled from weights that nobody knows.
            worker.actor.abandon.remote()

    def note_change(self) -> None:
        """Wake all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait for the next change, whatever it is."""
        await self._changed.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is asked again after each change.

        Raises the failure that ends the run.
        """
        while self.failure is None and not condition():
            await self.change()
        if self.failure is not None:
            raise self.failure

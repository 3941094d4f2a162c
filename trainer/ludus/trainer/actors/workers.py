"""The rollout workers: as many as are wanted, started, watched, replaced and let go.

    number wanted: rollout.num_workers, later `resize`
         |
         v
    one supervisor for each:   start an actor     (waits for room in Ray, as long as it takes)
         ^                 fetch the newest weights, canary
         |                 ready: rollout.num_groups_in_flight groups  <----  slot()   some of them
         |                 dies                                             play()   frees them
         +--- after a pause; several starts in a row that fail end the run with their reason

Nobody waits for a worker that is not ready: the run begins with rollout.min_workers, and goes
on with those that are there. What a dead worker played is refused by the buffer, so that it is
played by another. A worker that is no longer wanted gets no more slots, ends what it plays, and
is closed; so does one whose node is about to go, while another starts elsewhere. What it has not
ended when the node goes is lost with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from ludus.env import Message
from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.errors import CanaryError, UserError, WeightSyncError, WorkerStartError
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.cluster import LOOK_EVERY_S, draining_nodes, while_waiting
from ludus.trainer.actors.deaths import reason_of
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.worker_process import LOST, WorkerProcess
from ludus.trainer.interfaces import PublishedWeights
from ludus.trainer.processes import Slot
from ludus.trainer.types import GroupSpec, Sampling, lost_group
from ludus.trainer.weights import WorkerWeights

_log = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_FIRST_PAUSE_S = 1.0
_SLOW_START_S = 60.0
_CLOSE_TIMEOUT_S = 10.0
_GRACE_S = 5.0
"""A store that gives up by itself says more about why than can be said here."""


@dataclass(slots=True)
class RolloutWorkers:
    """The rollout workers of a run."""

    spec: RolloutWorkerSpec
    buffer: RemoteBuffer
    placement: Placement
    num_restarts: int = 0
    """Workers that died, or whose node was about to go, and that others replaced."""
    num_joined: int = 0
    """Workers that became ready, all in all."""
    _ready: list[WorkerProcess] = field(default_factory=list)
    _supervisors: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _background: set[asyncio.Task[None]] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _newest: PublishedWeights | None = None
    _failure: BaseException | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def start(
        cls, spec: RolloutWorkerSpec, buffer: RemoteBuffer, placement: Placement
    ) -> RolloutWorkers:
        """The workers, of which rollout.min_workers are ready to play.

        Raises:
            UserError: they cannot work as configured.
            WorkerStartError: they do not start.
        """
        workers = cls(spec, buffer, placement)
        rollout = spec.run.rollout
        workers.resize(rollout.num_workers)
        if not placement.is_one_machine:
            workers._keep(workers._follow_drains())
        try:
            enough = workers._until(lambda: workers.num_ready >= rollout.min_workers)
            await while_waiting(placement, enough)
        except BaseException:
            await workers.close()
            raise
        return workers

    @property
    def num_ready(self) -> int:
        """Workers that can play now."""
        return len(self._ready)

    @property
    def num_wanted(self) -> int:
        """Workers that there should be."""
        return len(self._supervisors)

    @property
    def held_weights(self) -> dict[int, WorkerWeights]:
        """What each ready worker samples from, by its number."""
        return {worker.number: worker.held for worker in self._ready if worker.held is not None}

    def resize(self, num_workers: int) -> None:
        """Want so many workers from now on, never fewer than min_workers."""
        num_workers = max(num_workers, self.spec.run.rollout.min_workers)
        while len(self._supervisors) < num_workers:
            self._add()
        while len(self._supervisors) > num_workers:
            self._keep(self._let_go(*self._supervisors.popitem()))

    async def slot(self) -> Slot:
        """A slot on the ready worker that has most of them free, once there is one.

        Raises:
            WorkerStartError: a worker does not start any more.
            WeightSyncError: a worker that joined did not hold the newest weights in time.
        """
        await self._until(lambda: any(worker.num_free for worker in self._ready))
        return max(self._ready, key=lambda worker: worker.num_free).take_slot()

    def free(self, slot: Slot) -> None:
        """Give a slot back in which nothing was played."""
        self._free(slot.worker, slot.size)

    async def play(self, slot: Slot, groups: Sequence[GroupSpec]) -> list[int]:
        """The indices of the groups that must be replaced; the others are in the buffer.

        Episodes that end with their worker reach the buffer as lost: they are counted.
        """
        worker: WorkerProcess = slot.worker
        self._free(worker, slot.size - len(groups))
        try:
            # The groups go from worker to buffer without passing through this process.
            refused = await self.buffer.put(worker.actor.play.remote(list(groups)))
            worker.num_played += 1
            return refused
        except LOST:
            self._leave(worker)
            return await self.buffer.put([lost_group(group) for group in groups])
        finally:
            self._free(worker, len(groups))

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        """The outcome of one game per seed, in the order of the seeds."""
        outcomes: dict[int, EpisodeOutcome] = {}
        missing = list(seeds)
        while missing:
            await self._until(lambda: bool(self._ready))
            workers = list(self._ready)
            parts = [
                self._evaluate_on(worker, environment, missing[index :: len(workers)], temperature)
                for index, worker in enumerate(workers)
            ]
            for part in await asyncio.gather(*parts):
                outcomes |= {outcome.seed: outcome for outcome in part}
            missing = [seed for seed in missing if seed not in outcomes]
        return [outcomes[seed] for seed in seeds]

    async def answer(
        self, messages: Sequence[Message], sampling: Sampling, seeds: Sequence[int]
    ) -> list[str]:
        """What the policy says to the messages, once per seed."""
        while True:
            slot = await self.slot()
            worker: WorkerProcess = slot.worker
            try:
                return await worker.actor.answer.remote(list(messages), sampling, list(seeds))
            except LOST:
                self._leave(worker)
            finally:
                self.free(slot)

    async def load_weights(
        self, published: PublishedWeights, timeout_s: float
    ) -> list[WorkerWeights]:
        """What the ready workers hold: the published weights; at least one worker does.

        A worker that joins later fetches them before it gets its first slot.

        Raises:
            CanaryError: a worker does not sample from them; it must take no traffic.
            WeightSyncError: a worker did not hold them in time.
        """
        self._newest = published
        self._note_change()
        while True:
            await self._until(lambda: bool(self._ready))
            loads = [self._load(worker, published, timeout_s) for worker in self._ready]
            held = [weights for weights in await asyncio.gather(*loads) if weights is not None]
            if held:
                return held

    async def close(self) -> None:
        """End all workers, with what they play."""
        ready, self._ready = self._ready, []
        closing = [asyncio.ensure_future(worker.actor.close.remote()) for worker in ready]
        tasks = [*self._supervisors.values(), *self._background, *closing]
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_TIMEOUT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add(self) -> None:
        """Want one more worker."""
        number = next(self._numbers)
        supervisor = asyncio.create_task(self._supervise(number))
        supervisor.add_done_callback(self._note_failure)
        self._supervisors[number] = supervisor

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine as a task, until it returns or all workers end."""
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _follow_drains(self) -> None:
        """Replace the workers whose nodes are about to go, before they do."""
        while True:
            try:
                draining = await asyncio.to_thread(draining_nodes)
            except ray.exceptions.RayError as error:
                _log.warning("cannot ask which nodes are about to go: %s", error)
                draining = frozenset()
            leaving = [worker.number for worker in self._ready if worker.node in draining]
            for number in self._supervisors.keys() & leaving:
                _log.warning("the node of rollout worker %d is about to go", number)
                self._keep(self._let_go(number, self._supervisors.pop(number)))
                self._add()
                self.num_restarts += 1
            await asyncio.sleep(LOOK_EVERY_S)

    async def _supervise(self, number: int) -> None:
        """Run a worker until it is closed, and another one each time that it dies."""
        num_failed = 0
        while True:
            worker = WorkerProcess.start(self.spec, self.placement, number)
            try:
                reason = await self._live(worker)
            finally:
                self._leave(worker)
                worker.kill()
            if reason is None:
                return
            num_failed = 0 if worker.num_played else num_failed + 1
            if num_failed >= _MAX_FAILED_STARTS:
                raise WorkerStartError(
                    f"rollout worker {number} ended {num_failed} times in a row before it had "
                    f"played anything: {reason}; see trainer.log, and whether the machine has "
                    "memory for the model"
                )
            self.num_restarts += 1
            _log.warning("rollout worker %d ended (%s); starting another", number, reason)
            await asyncio.sleep(_FIRST_PAUSE_S * (2**num_failed - 1))

    async def _live(self, worker: WorkerProcess) -> str | None:
        """Why the worker died; None when it was closed."""
        spec = replace(self.spec, number=worker.number)
        try:
            starting = asyncio.ensure_future(worker.actor.start.remote(spec))
            await asyncio.wait([starting], timeout=_SLOW_START_S)
            if not starting.done():
                _log.info("rollout worker %d still starts, or waits for room", worker.number)
            worker.node = await starting
            await self._join(worker)
            return await worker.watch()
        except LOST as error:
            return reason_of(error)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError | WeightSyncError):
                raise error.cause from error
            _log.exception("rollout worker %d cannot start", worker.number)
            return f"{type(error.cause).__name__}: {error.cause}"

    async def _join(self, worker: WorkerProcess) -> None:
        """Bring the newest weights to the worker, which is then ready."""
        while (newest := self._newest) is not None:
            try:
                held = await self._load(worker, newest, self.spec.run.weights.timeout_s)
            except CanaryError:
                raise
            except WeightSyncError as error:
                await self._await_newer_than(newest, error)
                continue
            if held is None:
                raise ray.exceptions.RayActorError(error_msg="it died over its first weights")
            if newest is self._newest:
                break
        self.num_joined += 1
        self._ready.append(worker)
        _log.info("rollout worker %d is ready; %d are", worker.number, self.num_ready)
        self._note_change()

    async def _await_newer_than(self, published: PublishedWeights, error: WeightSyncError) -> None:
        """Wait until other weights are to be fetched; raise `error` when none are in time.

        Weights may be gone with the learner that published them; its successor publishes again.
        """
        try:
            async with asyncio.timeout(self.spec.run.weights.timeout_s):
                while self._newest is published:
                    await self._changed.wait()
        except TimeoutError:
            raise error from None

    async def _load(
        self, worker: WorkerProcess, published: PublishedWeights, timeout_s: float
    ) -> WorkerWeights | None:
        """What the worker holds now: the published weights; None when it died."""
        manifest, held = published.manifest, worker.held
        if held is not None and (held.version, held.content_hash) == (
            manifest.version,
            manifest.content_hash,
        ):
            return held
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                held = await worker.actor.load_weights.remote(published)
        except LOST:
            self._leave(worker)
            return None
        except TimeoutError:
            raise WeightSyncError(
                f"weights version {manifest.version} ({manifest.num_bytes} bytes) did not reach "
                f"rollout worker {worker.number} within weights.timeout_s = {timeout_s:g}; "
                "raise it, or see trainer.log for what the worker does"
            ) from None
        if not held.ok:
            raise CanaryError(str(held))
        worker.held = held
        return held

    async def _evaluate_on(
        self, worker: WorkerProcess, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        """The outcomes; none when the worker died."""
        if not seeds:
            return []
        worker.num_evaluating += 1
        try:
            return await worker.actor.evaluate.remote(environment, list(seeds), temperature)
        except LOST:
            self._leave(worker)
            return []
        finally:
            worker.num_evaluating -= 1
            self._note_change()

    async def _let_go(self, number: int, supervisor: asyncio.Task[None]) -> None:
        """Close the worker, once it has ended what it plays."""
        for worker in [worker for worker in self._ready if worker.number == number]:
            self._leave(worker)
            await self._wait_until_idle(worker)
            # Its supervisor ends the process when it has closed, maybe before it could say so.
            with suppress(*LOST, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await worker.actor.close.remote()
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        _log.info("rollout worker %d is gone; %d are ready", number, self.num_ready)

    async def _wait_until_idle(self, worker: WorkerProcess) -> None:
        timeout_s = self.spec.run.rollout.group_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not worker.is_idle:
                    await self._changed.wait()
        except TimeoutError:
            _log.warning("rollout worker %d still plays after %g s", worker.number, timeout_s)

    def _leave(self, worker: WorkerProcess) -> None:
        """Give the worker no more slots."""
        if worker in self._ready:
            self._ready.remove(worker)
            self._note_change()

    def _free(self, worker: WorkerProcess, num_groups: int) -> None:
        worker.num_groups -= num_groups
        self._note_change()

    def _note_failure(self, supervisor: asyncio.Task[None]) -> None:
        if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
            self._failure = self._failure or error
            self._note_change()

    def _note_change(self) -> None:
        """Wake all who wait in `_until`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is asked again after each change."""
        while self._failure is None and not condition():
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

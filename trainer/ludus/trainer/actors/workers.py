"""The rollout workers: as many as are wanted, started, watched, replaced and let go.

    number wanted: rollout.num_workers, later `resize`
         |
         v
    one Supervisor for each  --->  Roster: which may play, and what they hold
                                      |
                                   slot()   some of the groups that a worker may play at once
                                   play()   frees them

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
from dataclasses import dataclass, field
from typing import Any

import ray

from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.errors import WorkerStartError
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.cluster import LOOK_EVERY_S, draining_nodes, while_waiting
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.processes import Slot
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.roster import Roster
from ludus.trainer.actors.supervisor import Supervisor
from ludus.trainer.actors.worker_process import LOST, WorkerProcess
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.tasks import TimeLimitError, wait_with_limit
from ludus.trainer.core.types import GroupSpec, SampledCompletion, Sampling, make_lost_group
from ludus.trainer.data.buffer import Refusal
from ludus.trainer.weights import CanaryJudge, WorkerWeights

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class RolloutWorkers:
    """The rollout workers of a run."""

    spec: RolloutWorkerSpec
    buffer: RemoteBuffer
    placement: Placement
    _roster: Roster = field(init=False)
    _supervisors: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _background: set[asyncio.Task[None]] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._roster = Roster(CanaryJudge(self.spec.run.weights.canary))

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
            enough = workers._until(
                lambda: workers.num_ready >= rollout.min_workers,
                f"rollout.min_workers = {rollout.min_workers}",
                spec.run.placement.start_timeout_s,
                "placement.start_timeout_s",
            )
            await while_waiting(placement, enough)
        except BaseException:
            await workers.close()
            raise
        return workers

    @property
    def num_ready(self) -> int:
        """Workers that can play now."""
        return len(self._roster.ready)

    @property
    def num_restarts(self) -> int:
        """Workers that died, or whose node was about to go, and that others replaced."""
        return self._roster.num_restarts

    @property
    def num_joined(self) -> int:
        """Workers that became ready, all in all."""
        return self._roster.num_joined

    @property
    def num_breaches(self) -> int:
        """Canary prompts that a worker answered from other weights, all in all."""
        return self._roster.num_breaches

    @property
    def num_wanted(self) -> int:
        """Workers that there should be."""
        return len(self._supervisors)

    @property
    def held_weights(self) -> dict[int, WorkerWeights]:
        """What each ready worker samples from, by its number."""
        return {
            worker.number: worker.held for worker in self._roster.ready if worker.held is not None
        }

    def resize(self, num_workers: int) -> None:
        """Want so many workers from now on: min_workers at least, and as there is ever room for."""
        num_workers = max(num_workers, self.spec.run.rollout.min_workers)
        most = self.placement.most_workers
        if num_workers > most:
            _log.warning("%d workers are wanted, and there is room for %d", num_workers, most)
            num_workers = most
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
        await self._roster.until(lambda: any(worker.num_free for worker in self._roster.ready))
        return max(self._roster.ready, key=lambda worker: worker.num_free).take_slot()

    def free(self, slot: Slot) -> None:
        """Give a slot back in which nothing was played."""
        self._free(slot.worker, slot.size)

    async def play(self, slot: Slot, groups: Sequence[GroupSpec]) -> list[Refusal]:
        """The groups that must be replaced; the others are in the buffer.

        Episodes that end with their worker reach the buffer as lost: they are counted.
        """
        worker: WorkerProcess = slot.worker
        self._free(worker, slot.size - len(groups))
        try:
            # The groups go from worker to buffer without passing through this process.
            refused = await self.buffer.put(worker.actor.play.remote(list(groups)))
            worker.num_played += len(groups) - len(refused)
            return refused
        except LOST:
            self._roster.leave(worker)
            return await self.buffer.put([make_lost_group(group) for group in groups])
        finally:
            self._free(worker, len(groups))

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        """The outcome of one game per seed, in the order of the seeds."""
        outcomes: dict[int, EpisodeOutcome] = {}
        missing = list(seeds)
        while missing:
            await self._until_ready()
            workers = list(self._roster.ready)
            parts = [
                self._evaluate_on(worker, environment, missing[index :: len(workers)], temperature)
                for index, worker in enumerate(workers)
            ]
            for part in await asyncio.gather(*parts):
                outcomes |= {outcome.seed: outcome for outcome in part}
            missing = [seed for seed in missing if seed not in outcomes]
        return [outcomes[seed] for seed in seeds]

    async def complete(
        self, prompt_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> list[SampledCompletion]:
        """What the policy says after the prompt, once per seed."""
        while True:
            slot = await self.slot()
            worker: WorkerProcess = slot.worker
            try:
                return await worker.actor.complete.remote(list(prompt_ids), sampling, list(seeds))
            except LOST:
                self._roster.leave(worker)
            finally:
                self.free(slot)

    async def load_weights(
        self, published: PublishedWeights, timeout_s: float
    ) -> list[WorkerWeights]:
        """What the ready workers hold: the published weights; at least one worker does.

        A worker that joins later fetches them before it gets its first slot. One that does not
        come to hold them is taken out of traffic, and its supervisor sees to it.

        Raises:
            CanaryError: no worker samples from them, or one never does.
            WeightSyncError: no worker came to hold them.
        """
        self._roster.publish(published)
        while True:
            await self._until_ready(lambda: self._roster.undelivered is not None)
            if not self._roster.ready and self._roster.undelivered is not None:
                raise self._roster.undelivered
            loads = [
                self._load_ready(worker, published, timeout_s) for worker in self._roster.ready
            ]
            held = [weights for weights in await asyncio.gather(*loads) if weights is not None]
            if held:
                return held

    async def _load_ready(
        self, worker: WorkerProcess, published: PublishedWeights, timeout_s: float
    ) -> WorkerWeights | None:
        """See Roster.load; None also when the worker is lost."""
        try:
            return await self._roster.load(worker, published, timeout_s)
        except LOST:
            self._roster.leave(worker)
            return None

    def describe(self) -> str:
        """How many workers are ready, and what each does."""
        return self._roster.describe()

    async def _until_ready(self, or_else: Callable[[], bool] = lambda: False) -> None:
        """Wait until a worker is ready, or something else holds."""
        await self._until(
            lambda: bool(self._roster.ready) or or_else(),
            "a rollout worker",
            self.spec.run.training.idle_timeout_s,
            "training.idle_timeout_s",
        )

    async def _until(
        self, condition: Callable[[], bool], what: str, timeout_s: float, setting: str
    ) -> None:
        """Wait until the condition holds, and say meanwhile what the workers do.

        Raises:
            WorkerStartError: it took too long.
        """
        try:
            await wait_with_limit(
                self._roster.until(condition),
                lambda: f"{what} ({self._roster.describe()})",
                timeout_s=timeout_s,
                setting=setting,
            )
        except TimeLimitError as error:
            raise WorkerStartError(str(error)) from None

    async def close(self) -> None:
        """End all workers, with what they play."""
        ready, self._roster.ready = self._roster.ready, []
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
        self._roster.doing[number] = "is about to start"
        supervisor = asyncio.create_task(
            Supervisor(number, self.spec, self.placement, self._roster).run()
        )
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
            leaving = [worker.number for worker in self._roster.ready if worker.node in draining]
            for number in self._supervisors.keys() & leaving:
                _log.warning("the node of rollout worker %d is about to go", number)
                self._keep(self._let_go(number, self._supervisors.pop(number)))
                self._add()
                self._roster.num_restarts += 1
            await asyncio.sleep(LOOK_EVERY_S)

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
            self._roster.leave(worker)
            return []
        finally:
            worker.num_evaluating -= 1
            self._roster.note_change()

    async def _let_go(self, number: int, supervisor: asyncio.Task[None]) -> None:
        """Close the worker, once it has ended what it plays."""
        for worker in [worker for worker in self._roster.ready if worker.number == number]:
            self._roster.leave(worker)
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
                    await self._roster.change()
        except TimeoutError:
            _log.warning("rollout worker %d still plays after %g s", worker.number, timeout_s)

    def _free(self, worker: WorkerProcess, num_groups: int) -> None:
        worker.num_groups -= num_groups
        self._roster.note_change()

    def _note_failure(self, supervisor: asyncio.Task[None]) -> None:
        if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
            self._roster.failure = self._roster.failure or error
            self._roster.note_change()

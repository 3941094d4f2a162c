"""The rollout workers of a run: start, supervision, replacement and removal.

    target number: rollout.num_workers, later `resize`
         |
         v
    one Supervisor per worker --> Roster: workers that may play, and their weights
                                      |
                                   acquire_slot()   reserves capacity for some groups
                                   WorkerSlot.play  releases the slot

The run starts when rollout.min_workers are ready, and never waits for the other workers. The buffer
refuses the groups of a dead worker, so that another worker plays them. A worker that is removed
gets no more slots, finishes its groups, and is closed. The same happens to a worker whose node will
be removed, while another worker starts on another node. Groups that are not finished when the node
disappears are lost.
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
from ludus.proto.runs import Transcript
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.cluster import POLL_INTERVAL_S, list_draining_nodes, wait_for_room
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.processes import Slot, Workers
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.roster import LOST_ERRORS, RolloutWorkerHandle, Roster
from ludus.trainer.actors.supervisor import Supervisor
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.tasks import TimeLimitError, wait_with_limit
from ludus.trainer.core.types import GroupSpec, SampledCompletion, Sampling, make_lost_group
from ludus.trainer.data.buffer import Refusal
from ludus.trainer.weights.canary import CanaryJudge, WorkerWeights

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class WorkerSlot(Slot):
    """Reserved capacity of a worker for some groups."""

    worker: RolloutWorkerHandle
    max_groups: int
    roster: Roster
    buffer: RemoteBuffer

    @property
    def worker_number(self) -> int:
        return self.worker.number

    async def play(self, specs: Sequence[GroupSpec]) -> list[Refusal]:
        """See Slot.play.

        If the worker dies, its groups are sent to the buffer as lost, so that they are counted.
        """
        worker = self.worker
        self._release_groups(self.max_groups - len(specs))
        try:
            # The groups go from worker to buffer without passing through this process.
            refusals = await self.buffer.put(worker.actor.play.remote(list(specs)))
            worker.num_played_groups += len(specs) - len(refusals)
            return refusals
        except LOST_ERRORS:
            self.roster.remove(worker)
            return await self.buffer.put(list(map(make_lost_group, specs)))
        finally:
            self._release_groups(len(specs))

    def release(self) -> None:
        self._release_groups(self.max_groups)

    def _release_groups(self, num_groups: int) -> None:
        self.worker.num_groups -= num_groups
        self.roster.notify()


@dataclass(slots=True)
class RolloutWorkers(Workers):
    """The rollout workers of a run."""

    spec: RolloutWorkerSpec
    buffer: RemoteBuffer
    placement: Placement
    roster: Roster = field(init=False)
    _supervisors: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _background_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _worker_numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.roster = Roster(CanaryJudge(self.spec.run.weights.canary))

    @classmethod
    async def start(
        cls, spec: RolloutWorkerSpec, buffer: RemoteBuffer, placement: Placement
    ) -> RolloutWorkers:
        """Start the workers, and return when rollout.min_workers are ready.

        Raises:
            UserError: the workers cannot work as configured.
            WorkerStartError: the workers do not start.
        """
        workers = cls(spec, buffer, placement)
        min_workers, timeout_s = spec.run.rollout.min_workers, spec.run.placement.start_timeout_s
        workers.resize(spec.run.rollout.num_workers)
        if not placement.is_one_machine:
            workers._start_task(workers._replace_draining_workers())
        try:
            readiness = workers._wait_until(
                lambda: len(workers.roster.ready_workers) >= min_workers,
                f"rollout.min_workers = {min_workers}",
                timeout_s,
                "placement.start_timeout_s",
            )
            await wait_for_room(placement, readiness)
        except BaseException:
            await workers.close()
            raise
        return workers

    @property
    def num_breaches(self) -> int:
        return self.roster.num_breaches

    @property
    def weights_by_worker(self) -> dict[int, WorkerWeights]:
        workers = self.roster.ready_workers
        return {worker.number: worker.weights for worker in workers if worker.weights is not None}

    def resize(self, num_workers: int) -> None:
        """Set the target number of workers, at least min_workers and at most max_workers."""
        num_workers = max(num_workers, self.spec.run.rollout.min_workers)
        max_workers = self.placement.max_workers
        if num_workers > max_workers:
            _log.warning(
                "%d workers were requested; there is room for %d", num_workers, max_workers
            )
            num_workers = max_workers
        while len(self._supervisors) < num_workers:
            self._add_worker()
        while len(self._supervisors) > num_workers:
            self._start_task(self._remove_worker(*self._supervisors.popitem()))

    async def acquire_slot(self) -> WorkerSlot:
        """Wait for a free slot, and return a slot of the worker with the most free groups.

        Raises:
            WorkerStartError: a worker failed to start too often.
            WeightSyncError: a worker that joined did not load the newest weights in time.
        """
        await self.roster.wait_until(
            lambda: any(worker.num_free_groups for worker in self.roster.ready_workers)
        )
        worker = max(self.roster.ready_workers, key=lambda worker: worker.num_free_groups)
        return WorkerSlot(worker, worker.reserve(), self.roster, self.buffer)

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        outcomes: dict[int, EpisodeOutcome] = {}
        while missing_seeds := [seed for seed in seeds if seed not in outcomes]:
            await self._wait_until_ready()
            workers = list(self.roster.ready_workers)
            calls = []
            for index, worker in enumerate(workers):
                worker_seeds = missing_seeds[index :: len(workers)]
                calls.append(self._evaluate(worker, environment, worker_seeds, temperature))
            for worker_outcomes in await asyncio.gather(*calls):
                outcomes |= {outcome.seed: outcome for outcome in worker_outcomes}
        return [outcomes[seed] for seed in seeds]

    async def play_samples(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[Transcript]:
        await self._wait_until_ready()
        worker = self.roster.ready_workers[0]
        worker.num_evaluations += 1
        try:
            return await worker.actor.play_samples.remote(environment, list(seeds), temperature)
        except LOST_ERRORS:
            self.roster.remove(worker)
            return []
        finally:
            worker.num_evaluations -= 1
            self.roster.notify()

    async def complete(
        self, prompt_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> list[SampledCompletion]:
        while True:
            slot = await self.acquire_slot()
            call = slot.worker.actor.complete
            try:
                return await call.remote(list(prompt_ids), sampling, list(seeds))
            except LOST_ERRORS:
                self.roster.remove(slot.worker)
            finally:
                slot.release()

    async def load_weights(
        self, published_weights: PublishedWeights, timeout_s: float
    ) -> list[WorkerWeights]:
        """Load published weights on the ready workers; return the loaded weights, at least one.

        A worker that joins later loads them before its first slot. A worker that fails to load
        them goes out of rotation, and its supervisor retries or replaces it.

        Raises:
            CanaryError: all workers failed the canary check, or one worker failed too often.
            WeightSyncError: no worker loaded the weights.
        """
        self.roster.publish(published_weights)
        while True:
            await self._wait_until_ready(lambda: self.roster.delivery_error is not None)
            if not self.roster.ready_workers and self.roster.delivery_error is not None:
                raise self.roster.delivery_error
            loads = [
                self._load_weights(worker, published_weights, timeout_s)
                for worker in self.roster.ready_workers
            ]
            loaded_weights = [weights for weights in await asyncio.gather(*loads) if weights]
            if loaded_weights:
                return loaded_weights

    async def _load_weights(
        self, worker: RolloutWorkerHandle, published_weights: PublishedWeights, timeout_s: float
    ) -> WorkerWeights | None:
        """See Roster.load; also return None if the worker is lost."""
        try:
            return await self.roster.load(worker, published_weights, timeout_s)
        except LOST_ERRORS:
            self.roster.remove(worker)
            return None

    def describe(self) -> str:
        return self.roster.describe()

    async def _wait_until_ready(self, stop_condition: Callable[[], bool] = lambda: False) -> None:
        """Wait until a worker is ready, or `stop_condition` returns true."""
        await self._wait_until(
            lambda: bool(self.roster.ready_workers) or stop_condition(),
            "a rollout worker",
            self.spec.run.training.idle_timeout_s,
            "training.idle_timeout_s",
        )

    async def _wait_until(
        self, condition: Callable[[], bool], description: str, timeout_s: float, setting: str
    ) -> None:
        """Wait until the condition is true; meanwhile log the activity of the workers.

        Raises:
            WorkerStartError: it took too long.
        """
        try:
            await wait_with_limit(
                self.roster.wait_until(condition),
                lambda: f"{description} ({self.roster.describe()})",
                timeout_s=timeout_s,
                setting=setting,
            )
        except TimeLimitError as error:
            raise WorkerStartError(str(error)) from None

    async def close(self) -> None:
        """Stop all workers without waiting for their groups."""
        workers, self.roster.ready_workers = self.roster.ready_workers, []
        close_calls = [asyncio.ensure_future(worker.actor.close.remote()) for worker in workers]
        tasks = [*self._supervisors.values(), *self._background_tasks, *close_calls]
        if close_calls:
            await asyncio.wait(close_calls, timeout=_CLOSE_TIMEOUT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add_worker(self) -> None:
        number = next(self._worker_numbers)
        self.roster.activities[number] = "is about to start"
        supervisor = Supervisor(number, self.spec, self.placement, self.roster)
        self._supervisors[number] = asyncio.create_task(supervisor.run())
        self._supervisors[number].add_done_callback(self._record_failure)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine as a task, until it returns or all workers stop."""
        task = asyncio.create_task(coroutine)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)

    async def _replace_draining_workers(self) -> None:
        """Replace workers whose nodes will be removed, before the nodes disappear."""
        while True:
            try:
                draining_node_ids = await asyncio.to_thread(list_draining_nodes)
            except ray.exceptions.RayError as error:
                _log.warning("cannot get the list of draining nodes: %s", error)
                draining_node_ids = frozenset()
            workers = self.roster.ready_workers
            draining_numbers = [
                worker.number for worker in workers if worker.node_id in draining_node_ids
            ]
            for number in self._supervisors.keys() & draining_numbers:
                _log.warning("the node of rollout worker %d will be removed", number)
                self._start_task(self._remove_worker(number, self._supervisors.pop(number)))
                self._add_worker()
                self.roster.num_restarts += 1
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _evaluate(
        self,
        worker: RolloutWorkerHandle,
        environment: str,
        seeds: Sequence[int],
        temperature: float,
    ) -> list[EpisodeOutcome]:
        """Return the outcomes; none if the worker died."""
        if not seeds:
            return []
        worker.num_evaluations += 1
        try:
            return await worker.actor.evaluate.remote(environment, list(seeds), temperature)
        except LOST_ERRORS:
            self.roster.remove(worker)
            return []
        finally:
            worker.num_evaluations -= 1
            self.roster.notify()

    async def _remove_worker(self, number: int, supervisor: asyncio.Task[None]) -> None:
        """Close the worker when it has finished its groups."""
        timeout_s = self.spec.run.rollout.group_timeout_s
        for worker in [worker for worker in self.roster.ready_workers if worker.number == number]:
            self.roster.remove(worker)
            try:
                async with asyncio.timeout(timeout_s):
                    while not worker.is_idle:
                        await self.roster.wait_for_change()
            except TimeoutError:
                _log.warning("rollout worker %d still plays after %g s", number, timeout_s)
            # The supervisor kills the process once it is closed, perhaps before it responds.
            with suppress(*LOST_ERRORS, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await worker.actor.close.remote()
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        _log.info("rollout worker %d stopped; %d ready", number, len(self.roster.ready_workers))

    def _record_failure(self, supervisor: asyncio.Task[None]) -> None:
        if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
            self.roster.failure = self.roster.failure or error
            self.roster.notify()

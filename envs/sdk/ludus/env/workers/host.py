"""Sessions in worker processes, isolated from each other.

                     +-- pool: a fixed number; each runs many sessions, the least loaded first
    open --assign--> worker
                     +-- process: one for each session; a few wait warm for the next opens

An open waits for a live worker, at most `_ASSIGN_TIMEOUT_S`. A call waits only for its own worker.
A worker that dies, or is killed because of a hanging step or its memory, ends its own sessions and
is replaced. If workers keep dying before they have a session, replacements start more and more
slowly, and opens fail with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ludus.env.backoff import generate_pauses
from ludus.env.sandbox.confine import Layer, Sandbox, describe_missing_layers
from ludus.env.sandbox.worker_resources import (
    find_option_paths,
    make_workers_folder,
    measure_disk_bytes,
    remove_folder,
)
from ludus.env.sessions.hosts import LostCallback
from ludus.env.sessions.interface import WorkerCounts
from ludus.env.sessions.options import ServerOptions
from ludus.env.targets.targets import TargetFactory
from ludus.env.types import EnvironmentDescription
from ludus.env.workers.child import measure_memory_mb
from ludus.env.workers.describe import describe_in_worker
from ludus.env.workers.forkserver_client import ForkServerClient
from ludus.env.workers.protocol import WorkerLimits
from ludus.env.workers.worker import Worker, WorkerSession
from ludus.proto.errors import (
    CallTimeoutError,
    ConfigError,
    ErrorCode,
    ExecutionError,
    SessionLostError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

_ASSIGN_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 1.0
_MEMORY_PERIOD_S = 0.25
_DISK_PERIOD_S = 1.0
_DETERMINISM_CHECK_S = 2.0
_NUM_WARM_WORKERS = 4
"""Number of workers kept ready for new sessions if each session has its own worker."""
_MAX_CLOSING_WORKERS = 32
"""Maximum number of workers that are closing the environments of ended sessions."""
_NUM_TOLERATED_FAILURES = 3
_MIN_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


class WorkerHost:
    """Sessions in worker processes; implements `SessionHost`, which documents its methods.

    Use `start` to make a host.
    """

    runs_inline = False
    is_stuck = False

    description: EnvironmentDescription
    layers: dict[Layer, bool]
    """Layers of the sandbox, and whether each is active."""
    missing_layers: str
    """Missing layers and the reasons, as text."""
    _num_threads: int = 0

    def __init__(self, factory: TargetFactory, options: ServerOptions) -> None:
        self.num_ended_workers = 0
        """Number of workers that ended without a request of this host."""
        self.shares_workers = options.isolation == "pool"
        self.step_timeout_s = options.step_timeout_s
        self._options = options
        limits = (options.memory_limit_mb, options.cpu_limit_s, options.disk_limit_mb)
        self._limits = WorkerLimits(*limits)
        self._sandbox = _make_sandbox(factory, options)
        self.fork_server = ForkServerClient(factory, self._limits, self._sandbox, options.pass_env)
        self._num_pooled = options.num_pool_workers if self.shares_workers else 0
        self._ids = itertools.count(1)
        self.live_workers: set[Worker] = set()
        """Workers whose processes may be alive."""
        self.ready_workers: list[Worker] = []
        """Live workers of a pool, or warm workers that wait for a session."""
        self._workers_changed = asyncio.Event()
        """Set when a worker starts or ends."""
        self._failures = _WorkerFailures()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refill_task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @classmethod
    async def start(cls, factory: TargetFactory, options: ServerOptions) -> WorkerHost:
        """Describe the environment and start a host with its workers.

        Raises:
            ConfigError: the environment cannot be imported, or cannot be built within the limits.
        """
        host = cls(factory, options)
        is_checked = options.check_determinism and not options.deterministic
        check_s = _DETERMINISM_CHECK_S if is_checked else 0.0
        try:
            report = await describe_in_worker(
                host.fork_server, host._limits, host._sandbox, check_s
            )
        except BaseException:
            await host.fork_server.stop()
            remove_folder(Path(host._sandbox.folder))
            raise
        host.description = report.description
        host.layers = {layer: layer not in report.missing_layers for layer in Layer}
        host.missing_layers = describe_missing_layers(report.missing_layers)
        if host.shares_workers and not report.steps_on_event_loop:
            host._num_threads = options.num_threads
        host._start_task(host._watch_memory())
        host._start_task(host._watch_disk())
        host._start_refill()
        return host

    @property
    def pids(self) -> list[int]:
        """Process ids of workers that may be alive."""
        return [worker.process.pid for worker in self.live_workers if worker.process.pid]

    @property
    def worker_counts(self) -> WorkerCounts:
        num_usable = sum(worker.is_usable for worker in self.live_workers)
        return WorkerCounts(num_usable, self.num_ended_workers, self.layers)

    @property
    def unavailable_reason(self) -> str:
        is_usable = any(worker.is_usable for worker in self.live_workers)
        return "" if is_usable else self._failures.summary

    async def open(
        self, session_id: str, *, with_text: bool, on_lost: LostCallback
    ) -> WorkerSession:
        while True:
            worker = await self._assign_worker(session_id)
            try:
                session = await self._open_in_worker(worker, session_id, with_text=with_text)
            except SessionLostError:
                if not worker.was_never_forked:
                    raise
                continue  # the worker never started, so another one can open the session
            worker.sessions[session_id] = on_lost
            return session

    async def _open_in_worker(
        self, worker: Worker, session_id: str, *, with_text: bool
    ) -> WorkerSession:
        worker.was_used = True
        session = WorkerSession(session_id, worker, self)
        limit_s = self.step_timeout_s or None
        try:
            await asyncio.wait_for(session.open(with_text), limit_s)
            if not worker.is_usable:  # it may have died after the reply
                raise SessionLostError(f"the session is gone: {worker.end_reason}; open it again")
        except TimeoutError:
            worker.sessions.pop(session_id, None)
            worker.kill(f"an environment took longer than {limit_s:g} s to build")
            raise CallTimeoutError(f"the environment was not built within {limit_s:g} s") from None
        except BaseException:
            worker.sessions.pop(session_id, None)
            if not self.shares_workers:
                worker.retire()
            raise
        worker.has_opened = True
        self._failures.forget()
        return session

    async def shut_down(self) -> None:
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in list(self.live_workers):
            worker.retire()
        await self._wait_for_exits()
        for worker in list(self.live_workers):
            worker.kill("its server is shutting down")
        await self._wait_for_exits()
        await self.fork_server.stop()
        for worker in list(self.live_workers):
            await worker.stream.close()
        # The fork server has removed the folder, unless it was killed.
        await asyncio.to_thread(remove_folder, Path(self._sandbox.folder))

    async def _assign_worker(self, session_id: str) -> Worker:
        """Reserve a worker for a session and return it; the caller then sets the callback."""
        deadline_s = asyncio.get_running_loop().time() + _ASSIGN_TIMEOUT_S
        while not self._is_stopping:
            worker = self._pick_worker() or await self._start_for_session()
            if worker is not None and worker.is_usable:
                worker.sessions[session_id] = _ignore_loss
                self._start_refill()
                return worker
            self._failures.raise_if_many()
            self._start_refill()
            self._workers_changed.clear()
            remaining_s = deadline_s - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._workers_changed.wait(), remaining_s)
            except TimeoutError:
                break
        raise UnavailableError(
            f"no worker process became available within {_ASSIGN_TIMEOUT_S:g} s; try again",
            retry_after_s=1.0,
        )

    def _pick_worker(self) -> Worker | None:
        if self.shares_workers:
            return min(self.ready_workers, key=lambda worker: len(worker.sessions), default=None)
        if len(self.live_workers) > self._max_workers:
            return None
        return self.ready_workers.pop() if self.ready_workers else None

    async def _start_for_session(self) -> Worker | None:
        """Start a worker for a session that found no warm worker."""
        if self.shares_workers or len(self.live_workers) >= self._max_workers:
            return None
        self._failures.raise_if_many()
        return await self._start_worker()

    @property
    def _max_workers(self) -> int:
        num_separate = self._options.max_sessions + _NUM_WARM_WORKERS + _MAX_CLOSING_WORKERS
        return self._num_pooled or num_separate

    async def _start_worker(self) -> Worker | None:
        worker = Worker(next(self._ids), self.fork_server, self._limits, self._record_end)
        self.live_workers.add(worker)
        try:
            await worker.start(self._num_threads)
        except (ConfigError, UnavailableError, OSError) as error:
            self.live_workers.discard(worker)
            self._failures.record(str(error), was_building=isinstance(error, ConfigError))
            return None
        except BaseException:
            self.live_workers.discard(worker)
            raise
        if self._is_stopping:
            worker.retire()
        return worker

    def _start_refill(self) -> None:
        """Start the missing workers in the background."""
        is_busy = self._refill_task is not None and not self._refill_task.done()
        if not is_busy and not self._is_stopping and self._count_missing() > 0:
            self._refill_task = self._start_task(self._refill())

    def _count_missing(self) -> int:
        if self.shares_workers:
            return self._num_pooled - len(self.ready_workers)
        num_allowed = self._options.max_sessions + _NUM_WARM_WORKERS - len(self.live_workers)
        return min(_NUM_WARM_WORKERS - len(self.ready_workers), num_allowed)

    async def _refill(self) -> None:
        while self._count_missing() > 0:
            await asyncio.sleep(self._failures.delay_s)
            worker = await self._start_worker()
            if worker is not None and worker.is_usable:
                self.ready_workers.append(worker)
            self._workers_changed.set()

    def _record_end(self, worker: Worker) -> None:
        if worker in self.ready_workers:
            self.ready_workers.remove(worker)
        if not worker.is_retired and not self._is_stopping:
            self.num_ended_workers += 1
            _log.warning("worker %s: %s", worker.process.pid, worker.end_reason)
            if worker.was_refused:
                self._failures.record(worker.end_reason, was_building=False)
            elif not (worker.has_opened or worker.was_never_forked):
                self._failures.record(worker.end_reason, was_building=worker.was_used)
        self._start_task(self._forget_after_exit(worker))
        self._workers_changed.set()
        self._start_refill()

    async def _forget_after_exit(self, worker: Worker) -> None:
        await worker.exit_event.wait()
        self.live_workers.discard(worker)
        self._workers_changed.set()
        self._start_refill()
        await asyncio.to_thread(remove_folder, self._sandbox.worker_folder(worker.process.id))

    async def _wait_for_exits(self) -> None:
        exits = asyncio.gather(*(worker.exit_event.wait() for worker in self.live_workers))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(exits, _EXIT_TIMEOUT_S)

    async def _watch_memory(self) -> None:
        limit_mb = self._limits.memory_mb
        while limit_mb:
            await asyncio.sleep(_MEMORY_PERIOD_S)
            for worker in self._list_usable_workers():
                used_mb = measure_memory_mb(worker.process.pid or 0)
                if used_mb > limit_mb:
                    worker.kill(
                        f"it used {used_mb:.0f} MB of memory, more than its limit of {limit_mb} MB"
                        " (memory_limit_mb)"
                    )

    async def _watch_disk(self) -> None:
        limit_mb = self._limits.disk_mb
        while limit_mb:
            await asyncio.sleep(_DISK_PERIOD_S)
            for worker in self._list_usable_workers():
                folder = self._sandbox.worker_folder(worker.process.id)
                used_mb = await asyncio.to_thread(measure_disk_bytes, folder) / 2**20
                if used_mb > limit_mb:
                    worker.kill(
                        f"its folder used {used_mb:.0f} MB, more than its limit of {limit_mb} MB"
                        " (disk_limit_mb)"
                    )

    def _list_usable_workers(self) -> list[Worker]:
        return [worker for worker in self.live_workers if worker.process.pid and worker.is_usable]

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _make_sandbox(factory: TargetFactory, options: ServerOptions) -> Sandbox:
    readable_paths = [*options.allow_read, *find_option_paths(factory.options)]
    return Sandbox(
        folder=str(make_workers_folder()),
        readable_paths=[str(path.absolute()) for path in readable_paths],
        writable_paths=[str(path.absolute()) for path in options.allow_write],
        without_network=options.no_network,
        max_processes=options.max_processes,
        is_required=options.require_sandbox,
        accepted_layers=list(options.accept_missing),
    )


def _ignore_loss(_: str) -> None:
    """Ignore the end of a worker whose session is not open yet."""


class _WorkerFailures:
    """Consecutive failures of workers that ended before they opened a session."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._reason = ""
        self._was_building = False
        self._retry_at_s = 0.0
        self._delays = generate_pauses(_MIN_DELAY_S, _MAX_DELAY_S)

    @property
    def delay_s(self) -> float:
        return max(0.0, self._retry_at_s - asyncio.get_running_loop().time())

    @property
    def summary(self) -> str:
        """Description of the last failures; "" if they are too few to matter."""
        if self._num_failures < _NUM_TOLERATED_FAILURES:
            return ""
        return (
            f"the last {self._num_failures} workers ended before they had a session;"
            f" the latest: {self._reason}"
        )

    def record(self, reason: str, *, was_building: bool) -> None:
        self._num_failures += 1
        self._reason = reason
        self._was_building = was_building
        delay_s = 0.0 if self._num_failures < _NUM_TOLERATED_FAILURES else next(self._delays)
        self._retry_at_s = asyncio.get_running_loop().time() + delay_s

    def forget(self) -> None:
        self._num_failures, self._retry_at_s = 0, 0.0
        self._delays = generate_pauses(_MIN_DELAY_S, _MAX_DELAY_S)

    def raise_if_many(self) -> None:
        """Raise the latest failure while the next worker is likely to fail too."""
        if not self.summary or self.delay_s <= 0:
            return
        if self._was_building:
            raise ExecutionError(self.summary, ErrorCode.FACTORY_ERROR)
        raise UnavailableError(self.summary, retry_after_s=self.delay_s)

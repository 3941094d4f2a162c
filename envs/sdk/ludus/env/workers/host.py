"""Sessions in worker processes: what one does to its process, no other feels.

                     +-- pool: a fixed number; each takes many sessions, the least loaded first
    open --place--> worker
                     +-- process: one for each session; a few wait warm for the next opens

Who waits for whom: an open waits for a living worker, at most `_PLACE_WITHIN_S`; calls wait
for their own worker only. A worker that dies, of itself or killed for a hanging step or for
its memory, takes its own sessions with it and is replaced; when workers keep dying before
they have held a session, new ones come ever more slowly and opens are told why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ludus.env.backoff import doubling
from ludus.env.sandbox.confine import Layer, Sandbox, describe_missing_layers
from ludus.env.sandbox.worker_resources import (
    disk_usage_bytes,
    make_workers_folder,
    paths_in_options,
    remove_folder,
)
from ludus.env.sessions.hosts import OnLost
from ludus.env.sessions.metrics import WorkerCounts
from ludus.env.targets.importable import FactoryName
from ludus.env.types import EnvironmentDescription
from ludus.env.workers.child import memory_mb
from ludus.env.workers.describe import describe
from ludus.env.workers.forkserver_client import ForkServerClient
from ludus.env.workers.process import Worker
from ludus.env.workers.protocol import WorkerLimits
from ludus.env.workers.session import WorkerSession
from ludus.proto.errors import (
    CallTimeoutError,
    ConfigError,
    ErrorCode,
    ExecutionError,
    SessionLostError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

_PLACE_WITHIN_S = 10.0
_CLOSE_WITHIN_S = 10.0
_EXIT_WITHIN_S = 1.0
_MEMORY_PERIOD_S = 0.25
_DISK_PERIOD_S = 1.0
_CHECK_S = 2.0
_MAX_ENDING = 32
"""Workers of ended sessions that may still be closing their environments."""
_NUM_FREE_FAILURES = 3
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How many workers there are, and what they may use."""

    isolation: Literal["pool", "process"] = "pool"
    num_workers: int = 1
    """Of a pool."""
    num_warm: int = 4
    """Where each session has its own: how many wait for the next opens."""
    max_sessions: int = 256
    num_threads: int = 32
    """Of a worker in a pool, for environments that do not step on the event loop."""
    step_timeout_s: float = 60.0
    """The limit for building and closing an environment, too; 0 is none."""
    limits: WorkerLimits = dataclasses.field(default_factory=WorkerLimits)
    check_determinism: bool = False
    pass_env: tuple[str, ...] = ()
    """Environment variables that workers get beside the harmless ones."""
    readable: tuple[Path, ...] = ()
    """Beside the system, the code, and what the environment's options name."""
    writable: tuple[Path, ...] = ()
    """Beside each worker's own folder."""
    without_network: bool = False
    requires_sandbox: bool = False


class WorkerHost:
    """Sessions in worker processes; implements `SessionHost`. `start` makes one."""

    runs_inline = False
    is_stuck = False

    def __init__(
        self,
        name: FactoryName,
        options: WorkerOptions,
        fork_server: ForkServerClient,
        sandbox: Sandbox,
    ) -> None:
        self.name = name.target
        self.num_ended = 0
        """Workers that ended without being told to by this host's owner."""
        self.shares_workers = options.isolation == "pool"
        self.step_timeout_s = options.step_timeout_s
        self._options = options
        self._fork_server = fork_server
        self._ids = itertools.count(1)
        self._workers: set[Worker] = set()
        """All that may still have a process."""
        self._ready: list[Worker] = []
        """In a pool those that live, else those that wait for a session."""
        self._changed = asyncio.Event()
        """Set whenever a worker came or went."""
        self._failures = _Failures()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refilling: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._sandbox = sandbox

    @classmethod
    async def start(cls, name: FactoryName, options: WorkerOptions) -> WorkerHost:
        """A host whose workers are being started.

        Raises:
            ConfigError: the environment cannot be imported or built, or not within its limits.
        """
        sandbox = _sandbox_of(name, options)
        fork_server = ForkServerClient(name, options.limits, sandbox, options.pass_env)
        host = cls(name, options, fork_server, sandbox)
        check_s = _CHECK_S if options.check_determinism else 0.0
        try:
            found = await describe(fork_server, options.limits, sandbox, check_s)
        except BaseException:
            await fork_server.stop()
            remove_folder(Path(sandbox.folder))
            raise
        host.description = found.description
        host.layers = {layer: layer not in found.missing for layer in Layer}
        host.missing_layers = describe_missing_layers(found.missing)
        if host.shares_workers and not found.steps_on_event_loop:
            host._num_threads = options.num_threads
        if options.limits.memory_mb:
            host._begin(host._watch_memory())
        if options.limits.disk_mb:
            host._begin(host._watch_disk())
        host._refill()
        return host

    description: EnvironmentDescription
    """What the environment is."""
    layers: dict[Layer, bool]
    """Of the sandbox, and whether they are in force."""
    missing_layers: str
    """Those that are not, and why, for people."""
    _num_threads: int = 0

    @property
    def pids(self) -> list[int]:
        """The process ids of workers that may live."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    @property
    def workers(self) -> WorkerCounts:
        """How many there are, and how many ended without being told to."""
        num_usable = sum(one.is_usable for one in self._workers)
        return WorkerCounts(num_usable, self.num_ended, self.layers)

    @property
    def trouble(self) -> str:
        """Why it can serve no session now; empty where it can. It goes on trying."""
        return "" if any(one.is_usable for one in self._workers) else self._failures.said

    @property
    def fork_server_pid(self) -> int | None:
        """The process from which workers are forked."""
        return self._fork_server.pid

    async def open(self, session_id: str, *, with_text: bool, on_lost: OnLost) -> WorkerSession:
        """A new session, to be reset.

        Raises:
            SessionLostError: its worker died meanwhile.
            CallTimeoutError: its environment took too long to build.
            UnavailableError: there is no worker to be had.
        """
        while True:
            worker = await self._place(session_id)
            try:
                session = await self._open_on(worker, session_id, with_text=with_text)
            except SessionLostError:
                if not worker.was_never_forked:
                    raise
                continue  # nothing was begun, and the next fork server's workers are as good
            worker.sessions[session_id] = on_lost
            return session

    async def _open_on(self, worker: Worker, session_id: str, *, with_text: bool) -> WorkerSession:
        worker.was_asked = True
        session = WorkerSession(session_id, worker, self)
        limit_s = self.step_timeout_s or None
        try:
            await asyncio.wait_for(session.open(with_text), limit_s)
            if not worker.is_usable:  # between the answer and now
                raise SessionLostError(f"the session is gone: {worker.end_reason}; open it again")
        except TimeoutError:
            worker.sessions.pop(session_id, None)
            session.worker.kill(f"an environment took longer than {limit_s:g} s to build")
            raise CallTimeoutError(
                f"expected the environment to be built within {limit_s:g} s, but it was not"
            ) from None
        except BaseException:
            worker.sessions.pop(session_id, None)
            if not self.shares_workers:
                worker.retire()
            raise
        worker.has_opened = True
        self._failures.forget()
        return session

    async def close_session(self, session: WorkerSession) -> None:
        """Close its environment, or find its worker gone."""
        worker = session.worker
        worker.sessions.pop(session.id, None)
        if not self.shares_workers:
            worker.retire()
            await worker.exited.wait()
            return
        if not worker.is_usable:
            return
        limit_s = self.step_timeout_s or _CLOSE_WITHIN_S
        try:
            await asyncio.wait_for(session.send_close(), limit_s)
        except TimeoutError:
            worker.kill(f"an environment took longer than {limit_s:g} s to close")
        except SessionLostError:
            return

    async def shut_down(self) -> None:
        """End the fork server and all workers."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in list(self._workers):
            worker.retire()
        await self._wait_for_exits()
        for worker in list(self._workers):
            worker.kill("its server is shutting down")
        await self._wait_for_exits()
        await self._fork_server.stop()
        for worker in list(self._workers):
            await worker.stream.close()
        # The fork server has done it, unless it was killed.
        await asyncio.to_thread(remove_folder, Path(self._sandbox.folder))

    # -- placement ---------------------------------------------------------------------

    async def _place(self, session_id: str) -> Worker:
        """A worker that counts the session already; whoever opens it hears of its end."""
        deadline_s = asyncio.get_running_loop().time() + _PLACE_WITHIN_S
        while not self._is_stopping:
            worker = self._pick() or await self._start_for_session()
            if worker is not None and worker.is_usable:
                worker.sessions[session_id] = _tell_nobody
                self._refill()
                return worker
            self._failures.raise_if_many()
            self._refill()
            self._changed.clear()
            left_s = deadline_s - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                break
        raise UnavailableError(
            f"expected a worker process within {_PLACE_WITHIN_S:g} s, got none; try again",
            retry_after_s=1.0,
        )

    def _pick(self) -> Worker | None:
        if self.shares_workers:
            return min(self._ready, key=lambda worker: len(worker.sessions), default=None)
        if len(self._workers) > self._max_workers:
            return None
        return self._ready.pop() if self._ready else None

    async def _start_for_session(self) -> Worker | None:
        """A worker of its own for a session that found none warm."""
        if self.shares_workers or len(self._workers) >= self._max_workers:
            return None
        self._failures.raise_if_many()
        return await self._started()

    @property
    def _max_workers(self) -> int:
        options = self._options
        if self.shares_workers:
            return options.num_workers
        return options.max_sessions + options.num_warm + _MAX_ENDING

    # -- workers -----------------------------------------------------------------------

    async def _started(self) -> Worker | None:
        worker = Worker(next(self._ids), self._fork_server, self._options.limits, self._on_end)
        self._workers.add(worker)
        try:
            await worker.start(self._num_threads)
        except (ConfigError, UnavailableError, OSError) as error:
            self._workers.discard(worker)
            self._failures.note(str(error), while_building=isinstance(error, ConfigError))
            return None
        except BaseException:
            self._workers.discard(worker)
            raise
        if self._is_stopping:
            worker.retire()
        return worker

    def _refill(self) -> None:
        """See to it that there are as many workers as there should be."""
        is_busy = self._refilling is not None and not self._refilling.done()
        if not is_busy and not self._is_stopping and self._num_wanted() > 0:
            self._refilling = self._begin(self._fill())

    def _num_wanted(self) -> int:
        options = self._options
        if self.shares_workers:
            return options.num_workers - len(self._ready)
        room = options.max_sessions + options.num_warm - len(self._workers)
        return min(options.num_warm - len(self._ready), room)

    async def _fill(self) -> None:
        while self._num_wanted() > 0:
            await asyncio.sleep(self._failures.delay_s)
            worker = await self._started()
            if worker is not None and worker.is_usable:
                self._ready.append(worker)
            self._changed.set()

    def _on_end(self, worker: Worker) -> None:
        if worker in self._ready:
            self._ready.remove(worker)
        if not worker.is_retired and not self._is_stopping:
            self.num_ended += 1
            _log.warning("worker %s: %s", worker.process.pid, worker.end_reason)
            if worker.was_refused:
                self._failures.note(worker.end_reason, while_building=False)
            elif not (worker.has_opened or worker.was_never_forked):
                self._failures.note(worker.end_reason, while_building=worker.was_asked)
        self._begin(self._forget_when_gone(worker))
        self._changed.set()
        self._refill()

    async def _forget_when_gone(self, worker: Worker) -> None:
        await worker.exited.wait()
        self._workers.discard(worker)
        self._changed.set()
        self._refill()
        await asyncio.to_thread(remove_folder, self._sandbox.worker_folder(worker.process.id))

    async def _wait_for_exits(self) -> None:
        waits = [asyncio.ensure_future(worker.exited.wait()) for worker in self._workers]
        if waits:
            _, late = await asyncio.wait(waits, timeout=_EXIT_WITHIN_S)
            for wait in late:
                wait.cancel()

    async def _watch_memory(self) -> None:
        limit_mb = self._options.limits.memory_mb
        while True:
            await asyncio.sleep(_MEMORY_PERIOD_S)
            for worker, pid in self._running():
                used_mb = memory_mb(pid)
                if used_mb > limit_mb:
                    worker.kill(
                        f"it used {used_mb:.0f} MB of memory, and its limit is {limit_mb} MB"
                        " (memory_limit_mb)"
                    )

    async def _watch_disk(self) -> None:
        limit_mb = self._options.limits.disk_mb
        while True:
            await asyncio.sleep(_DISK_PERIOD_S)
            for worker, _ in self._running():
                folder = self._sandbox.worker_folder(worker.process.id)
                used_mb = await asyncio.to_thread(disk_usage_bytes, folder) / 2**20
                if used_mb > limit_mb:
                    worker.kill(
                        f"its folder took {used_mb:.0f} MB, and its limit is {limit_mb} MB"
                        " (disk_limit_mb)"
                    )

    def _running(self) -> list[tuple[Worker, int]]:
        return [
            (worker, worker.process.pid)
            for worker in self._workers
            if worker.process.pid is not None and worker.is_usable
        ]

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _sandbox_of(name: FactoryName, options: WorkerOptions) -> Sandbox:
    readable = [*options.readable, *paths_in_options(name.options)]
    return Sandbox(
        folder=str(make_workers_folder()),
        readable=[str(path.absolute()) for path in readable],
        writable=[str(path.absolute()) for path in options.writable],
        without_network=options.without_network,
        is_required=options.requires_sandbox,
    )


def _tell_nobody(_: str) -> None:
    """Stand in for a session that is not open yet."""


class _Failures:
    """Workers that ended one after another before they had ever held a session."""

    def __init__(self) -> None:
        self._num = 0
        self._reason = ""
        self._while_building = False
        self._retry_at_s = 0.0
        self._delays = doubling(_FIRST_DELAY_S, _MAX_DELAY_S)

    @property
    def delay_s(self) -> float:
        """How long to wait before the next worker is started."""
        return max(0.0, self._retry_at_s - asyncio.get_running_loop().time())

    @property
    def said(self) -> str:
        """What the last workers met; empty where they were too few to tell."""
        if self._num < _NUM_FREE_FAILURES:
            return ""
        return (
            f"the last {self._num} workers ended before they held a session;"
            f" the latest: {self._reason}"
        )

    def note(self, reason: str, *, while_building: bool) -> None:
        """Count one more, that was building an environment or not yet asked to."""
        self._num += 1
        self._reason = reason
        self._while_building = while_building
        delay_s = 0.0 if self._num < _NUM_FREE_FAILURES else next(self._delays)
        self._retry_at_s = asyncio.get_running_loop().time() + delay_s

    def forget(self) -> None:
        """A worker holds a session: all is well."""
        self._num, self._retry_at_s = 0, 0.0
        self._delays = doubling(_FIRST_DELAY_S, _MAX_DELAY_S)

    def raise_if_many(self) -> None:
        """Refuse when the next worker is likely to fail as the last ones did.

        Raises:
            ExecutionError: the latest was building an environment (code FACTORY_ERROR).
            UnavailableError: it had not been asked to yet, so this is not its doing.
        """
        if not self.said or self.delay_s <= 0:
            return
        if self._while_building:
            raise ExecutionError(self.said, ErrorCode.FACTORY_ERROR)
        raise UnavailableError(self.said, retry_after_s=self.delay_s)

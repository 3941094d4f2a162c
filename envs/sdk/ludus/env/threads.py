"""Threads for code that may never return.

    call --> queue --> thread --> future
                         |
                         +-- hangs, is given up --> written off, another takes its place

A thread cannot be stopped. One that was given up stays behind with what it runs; if that ever
returns, it is let go, and the thread ends. As many are replaced as there were to begin with; when
the last ones hang as well, nothing can be served any more, and `trouble` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar

from ludus.proto.errors import UnavailableError

ResultT = TypeVar("ResultT")

STEP_THREAD_NAME = "ludus-env-step"


class _State(Enum):
    WAITING = 1
    RUNNING = 2
    GIVEN_UP = 3
    DONE = 4


class Job(Generic[ResultT]):
    """A call that waits for a thread, runs in one, or has run.

    Args:
        let_go: what to do with the result of a call that was given up; None where it raised.
    """

    def __init__(
        self, call: Callable[[], ResultT], let_go: Callable[[ResultT | None], None]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[ResultT] = self.loop.create_future()
        self._call = call
        self._let_go = let_go
        self._state = _State.WAITING
        self._began_s = 0.0
        self._lock = threading.Lock()

    def left_s(self, limit_s: float) -> float:
        """How long it may still run: all of the limit while no thread has begun it."""
        if not self._began_s:
            return limit_s
        return self._began_s + limit_s - self.loop.time()

    def moves(self, before: _State, after: _State) -> bool:
        """True when it was in the one state, and is in the other now."""
        with self._lock:
            if self._state is not before:
                return False
            self._state = after
            return True

    def run(self, settle: Callable[[], None]) -> bool:
        """Make the call, in a thread; False when it had been given up before it returned."""
        self._began_s = self.loop.time()
        result: ResultT | None = None
        failed: BaseException | None = None
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            failed = error
        try:
            if not self.moves(_State.RUNNING, _State.DONE):
                self._let_go(result)
                return False
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self.loop.call_soon_threadsafe(self._deliver, settle, result, failed)
            return True
        finally:
            del failed  # it has this frame in its traceback, and they would keep each other

    def _deliver(
        self, settle: Callable[[], None], result: ResultT | None, failed: BaseException | None
    ) -> None:
        settle()
        if self.future.done():
            return
        if failed is not None:
            self.future.set_exception(failed)
        else:
            self.future.set_result(result)  # type: ignore[arg-type]


class StepThreads:
    """At most `num_threads` that are of use; belongs to one event loop."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._queue: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._num_live = 0
        self._num_wanted = 0
        """Calls that wait or run."""
        self._num_lost = 0
        self._ids = itertools.count(1)

    @property
    def trouble(self) -> str:
        """Why nothing can run any more; empty while something can."""
        if self._num_allowed > 0:
            return ""
        return (
            f"all {self._num_threads} threads and as many in their place hang in the environment's"
            " code; restart the server, and isolate its sessions (isolation='pool')"
        )

    def start(self, call: Callable[[], ResultT], let_go: Callable[[ResultT | None], None]) -> Job:
        """The call on its way to a thread.

        Raises:
            UnavailableError: no thread is left.
        """
        self._raise_if_stuck()
        job = Job(call, let_go)
        self._num_wanted += 1
        self._queue.put(job)
        self._grow()
        return job

    async def run(
        self,
        call: Callable[[], ResultT],
        let_go: Callable[[ResultT | None], None],
        limit_s: float,
    ) -> ResultT:
        """The call's value; where nobody waits for it any more, it is let go.

        Raises:
            TimeoutError: it has run for longer than the limit, and was given up; 0 is none.
        """
        job = self.start(call, let_go)
        left_s = limit_s or None
        try:
            while not (await asyncio.wait({job.future}, timeout=left_s))[0]:
                left_s = job.left_s(limit_s)
                if left_s <= 0:
                    self.give_up(job)
                    raise TimeoutError
        except asyncio.CancelledError:
            job.future.add_done_callback(lambda done: self._let_go(done, let_go))
            raise
        return await job.future

    def give_up(self, job: Job[Any]) -> bool:
        """Let nobody wait for a call any more; True when it keeps a thread that runs it."""
        if job.moves(_State.WAITING, _State.GIVEN_UP):
            is_lost = False
        elif job.moves(_State.RUNNING, _State.GIVEN_UP):
            is_lost = True
            self._num_live -= 1
            self._num_lost += 1
        else:
            return False
        self._num_wanted -= 1
        job.future.cancel()
        self._grow()
        if not self._num_allowed:
            self._refuse_waiting()
        return is_lost

    def shut_down(self) -> None:
        """Let the threads end that do nothing; what still runs is left behind."""
        for _ in range(self._num_live):
            self._queue.put(None)

    @property
    def _num_allowed(self) -> int:
        return min(self._num_threads, 2 * self._num_threads - self._num_lost)

    def _let_go(
        self, done: asyncio.Future[ResultT], let_go: Callable[[ResultT | None], None]
    ) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        with contextlib.suppress(UnavailableError):  # then the process is about to end
            self.start(lambda: let_go(done.result()), lambda _: None)

    def _grow(self) -> None:
        while self._num_live < min(self._num_wanted, self._num_allowed):
            self._num_live += 1
            name = f"{STEP_THREAD_NAME}_{next(self._ids)}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if not job.moves(_State.WAITING, _State.RUNNING):
                continue
            if not job.run(self._settled):
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    job.loop.call_soon_threadsafe(self._came_back)
                return
            del job  # what it came to does not wait here for the next one

    def _settled(self) -> None:
        self._num_wanted -= 1

    def _came_back(self) -> None:
        self._num_lost -= 1
        self._grow()

    def _refuse_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None and job.moves(_State.WAITING, _State.GIVEN_UP):
                    self._num_wanted -= 1
                    job.future.set_exception(UnavailableError(self.trouble))

    def _raise_if_stuck(self) -> None:
        if not self._num_allowed:
            raise UnavailableError(self.trouble)

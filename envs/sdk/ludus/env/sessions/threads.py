"""Threads for code that may never return.

    call --> queue --> thread --> future
                         |
                         +-- hangs --> abandoned and replaced by another thread

A thread cannot be stopped. An abandoned thread stays with its call; if the call ever returns, the
result is released and the thread exits. The number of replacements is limited to the
initial number of threads. When the last replacement hangs too, `unavailable_reason` is set.
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


class _JobState(Enum):
    WAITING = 1
    RUNNING = 2
    GIVEN_UP = 3
    DONE = 4


class Job(Generic[ResultT]):
    """A call that waits for a thread, runs in one, or has run.

    Args:
        release: called with the result of a call that was given up, or None if it raised.
    """

    def __init__(
        self, call: Callable[[], ResultT], release: Callable[[ResultT | None], None]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[ResultT] = self.loop.create_future()
        self._call = call
        self._release = release
        self._state = _JobState.WAITING
        self._started_s = 0.0
        self._lock = threading.Lock()

    def remaining_s(self, limit_s: float) -> float:
        """Return the time left to run; the whole limit if no thread has started the call."""
        if not self._started_s:
            return limit_s
        return self._started_s + limit_s - self.loop.time()

    def change_state(self, old_state: _JobState, new_state: _JobState) -> bool:
        """Change the state if it is `old_state`, and return whether it was."""
        with self._lock:
            if self._state is not old_state:
                return False
            self._state = new_state
            return True

    def run(self, on_finished: Callable[[], None]) -> bool:
        """Run the call in this thread; return False if it was given up in the meantime."""
        self._started_s = self.loop.time()
        result: ResultT | None = None
        error: BaseException | None = None
        try:
            result = self._call()
        except BaseException as exception:  # noqa: BLE001 - `_deliver` raises it in the caller
            error = exception
        try:
            if not self.change_state(_JobState.RUNNING, _JobState.DONE):
                self._release(result)
                return False
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self.loop.call_soon_threadsafe(self._deliver, on_finished, result, error)
            return True
        finally:
            # The traceback refers to this frame, so keeping the error would make a reference cycle.
            del error

    def _deliver(
        self, on_finished: Callable[[], None], result: ResultT | None, error: BaseException | None
    ) -> None:
        on_finished()
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)  # type: ignore[arg-type]


class StepThreads:
    """A pool of at most `num_threads` usable threads; belongs to one event loop."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._queue: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._num_live_threads = 0
        self._num_jobs = 0
        """Number of calls that wait or run."""
        self._num_abandoned_threads = 0
        self._ids = itertools.count(1)

    @property
    def unavailable_reason(self) -> str:
        """Reason why no call can run; "" if calls can run."""
        if self._max_live_threads > 0:
            return ""
        return (
            f"all {self._num_threads} threads and their replacements hang in the environment's"
            " code; restart the server, and isolate its sessions (isolation='pool')"
        )

    def submit(
        self, call: Callable[[], ResultT], release: Callable[[ResultT | None], None]
    ) -> Job[ResultT]:
        """Queue a call for the next free thread.

        Raises:
            UnavailableError: all threads hang.
        """
        if self.unavailable_reason:
            raise UnavailableError(self.unavailable_reason)
        job = Job(call, release)
        self._num_jobs += 1
        self._queue.put(job)
        self._start_missing_threads()
        return job

    async def run(
        self, call: Callable[[], ResultT], release: Callable[[ResultT | None], None], limit_s: float
    ) -> ResultT:
        """Run a call and return its result; if the caller is cancelled, release the result.

        Raises:
            TimeoutError: the call ran longer than the limit and was given up; 0 sets no limit.
        """
        job = self.submit(call, release)
        remaining_s = limit_s or None
        try:
            while not (await asyncio.wait({job.future}, timeout=remaining_s))[0]:
                remaining_s = job.remaining_s(limit_s)
                if remaining_s <= 0:
                    self.give_up(job)
                    raise TimeoutError
        except asyncio.CancelledError:
            job.future.add_done_callback(lambda future: self._release_result(future, release))
            raise
        result: ResultT = await job.future
        return result

    def give_up(self, job: Job[Any]) -> bool:
        """Abandon a call; return True if a thread still runs it."""
        if job.change_state(_JobState.WAITING, _JobState.GIVEN_UP):
            is_running = False
        elif job.change_state(_JobState.RUNNING, _JobState.GIVEN_UP):
            is_running = True
            self._num_live_threads -= 1
            self._num_abandoned_threads += 1
        else:
            return False
        self._num_jobs -= 1
        job.future.cancel()
        self._start_missing_threads()
        if not self._max_live_threads:
            self._refuse_waiting_jobs()
        return is_running

    def shut_down(self) -> None:
        """Tell the threads to exit once the queue is empty, without waiting for them."""
        for _ in range(self._num_live_threads):
            self._queue.put(None)

    @property
    def _max_live_threads(self) -> int:
        return min(self._num_threads, 2 * self._num_threads - self._num_abandoned_threads)

    def _release_result(
        self, future: asyncio.Future[ResultT], release: Callable[[ResultT | None], None]
    ) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        with contextlib.suppress(UnavailableError):  # the process is about to exit
            self.submit(lambda: release(future.result()), lambda _: None)

    def _start_missing_threads(self) -> None:
        while self._num_live_threads < min(self._num_jobs, self._max_live_threads):
            self._num_live_threads += 1
            name = f"{STEP_THREAD_NAME}_{next(self._ids)}"
            threading.Thread(target=self._run_jobs, name=name, daemon=True).start()

    def _run_jobs(self) -> None:
        while (job := self._queue.get()) is not None:
            if not job.change_state(_JobState.WAITING, _JobState.RUNNING):
                continue
            if not job.run(self._finish_job):
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    job.loop.call_soon_threadsafe(self._forget_abandoned)
                return
            del job  # free its result before waiting for the next job

    def _finish_job(self) -> None:
        self._num_jobs -= 1

    def _forget_abandoned(self) -> None:
        self._num_abandoned_threads -= 1
        self._start_missing_threads()

    def _refuse_waiting_jobs(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None and job.change_state(_JobState.WAITING, _JobState.GIVEN_UP):
                    self._num_jobs -= 1
                    job.future.set_exception(UnavailableError(self.unavailable_reason))

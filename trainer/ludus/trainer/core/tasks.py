"""Groups of tasks that are cancelled together, and waits with a time limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)
LOG_INTERVAL_S = 60.0


class TimeLimitError(TimeoutError):
    """A wait exceeded its time limit."""


class CancellingTaskGroup(asyncio.TaskGroup):
    """A task group that cancels its tasks when its block ends.

    A TaskGroup waits for its tasks and raises an exception group. This class cancels unfinished
    tasks instead, and raises only the first failure, because callers expect a single exception.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unfinished_tasks: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Start a coroutine as a task, which may finish at any time."""
        task = self.create_task(coroutine)
        self._unfinished_tasks.add(task)
        task.add_done_callback(self._unfinished_tasks.discard)
        return task

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._unfinished_tasks:
            task.cancel()
        try:
            await super().__aexit__(error_type, error, traceback)
        except BaseExceptionGroup as failure_group:
            if error is None or isinstance(error, asyncio.CancelledError):
                first_failure = failure_group.exceptions[0]
                raise first_failure from first_failure.__cause__


async def gather_or_cancel(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return the results of all coroutines; the first failure cancels the others."""
    async with CancellingTaskGroup() as tasks:
        started_tasks = [tasks.start(coroutine) for coroutine in coroutines]
        return [await task for task in started_tasks]


async def wait_for_first(task: asyncio.Task[Any], event: Coroutine[Any, Any, None]) -> bool:
    """Wait until a task has ended or an event has happened; return whether the task has ended.

    The task is not cancelled.
    """
    event_task = asyncio.create_task(event)
    try:
        await asyncio.wait([task, event_task], return_when=asyncio.FIRST_COMPLETED)
    finally:
        event_task.cancel()
    return task.done()


async def wait_with_limit(
    awaitable: Awaitable[ResultT],
    description: str | Callable[[], str],
    *,
    timeout_s: float,
    setting: str,
) -> ResultT:
    """Return the result of `awaitable`. During the wait, log its description once a minute.

    Args:
        description: description of the awaited work, or a function that returns its current one.
        setting: configuration field that sets the limit.

    Raises:
        TimeLimitError: the wait took longer than `timeout_s`.
    """
    task = asyncio.ensure_future(awaitable)
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    def describe() -> str:
        return description if isinstance(description, str) else description()

    try:
        while (remaining_s := start_s + timeout_s - loop.time()) > 0:
            await asyncio.wait([task], timeout=min(remaining_s, LOG_INTERVAL_S))
            if task.done():
                return task.result()
            _log.info("waiting for %s, %.0f s so far", describe(), loop.time() - start_s)
    finally:
        task.cancel()
    raise TimeLimitError(
        f"waited for {describe()} longer than {setting} = {timeout_s:g} s; see trainer.log for the "
        "last completed work, and raise the limit if more time is needed"
    )

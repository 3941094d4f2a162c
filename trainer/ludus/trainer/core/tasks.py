"""Tasks that end together, and waits that end.

`Tasks` and `together`: the first failure ends the others, and is raised as itself. `limited`: what
takes too long is named and given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)
_SAY_EVERY_S = 60.0


class TookTooLongError(TimeoutError):
    """What was waited for did not come within its limit."""


class Tasks(asyncio.TaskGroup):
    """A task group whose tasks run beside its block, and end with it.

    A TaskGroup waits for its tasks and raises failures in a group. Here they are cancelled when
    the block is over, and what failed first is raised alone, as callers expect it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """The coroutine as a task; it may end well at any time."""
        task = self.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._running:
            task.cancel()
        try:
            await super().__aexit__(kind, error, traceback)
        except BaseExceptionGroup as failures:
            if error is None or isinstance(error, asyncio.CancelledError):
                first = failures.exceptions[0]
                raise first from first.__cause__


async def together(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all; the first failure does not wait for the others, which it cancels."""
    async with Tasks() as tasks:
        started = [tasks.start(coroutine) for coroutine in coroutines]
        return [await task for task in started]


async def limited(
    waiting: Awaitable[ResultT], what: str | Callable[[], str], *, timeout_s: float, setting: str
) -> ResultT:
    """What `waiting` returns; meanwhile the log says now and then that `what` is waited for.

    Args:
        what: is asked each time where it may say how things stand.

    Raises:
        TookTooLongError: it took longer than `timeout_s`, which is set by `setting`.
    """
    task = asyncio.ensure_future(waiting)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    def said() -> str:
        return what if isinstance(what, str) else what()

    try:
        while (left_s := begun_s + timeout_s - loop.time()) > 0:
            await asyncio.wait([task], timeout=min(left_s, _SAY_EVERY_S))
            if task.done():
                return task.result()
            _log.info("waiting for %s, %.0f s so far", said(), loop.time() - begun_s)
    finally:
        task.cancel()
    raise TookTooLongError(
        f"waited for {said()} longer than {setting} = {timeout_s:g} s; see trainer.log for what "
        "was done last, and raise the limit if it needs longer"
    )

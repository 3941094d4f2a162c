"""Tasks beside a main one; whatever fails first ends them all, with its own error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class Background:
    """Holds the tasks; as a context, none of them outlives it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, coroutine: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """The coroutine as a task; it may end well at any time."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def run(self, main: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What `main` returns.

        Raises:
            Exception: of `main`, or of the first task that failed while it ran.
        """
        task = asyncio.create_task(main)
        try:
            waiting: set[asyncio.Future[Any]] = {task, self._failure}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def __aenter__(self) -> Background:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Nobody may have been there to be told.
        self._failure.cancel()

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.add_done_callback(lambda failure: failure.exception())

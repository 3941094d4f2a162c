"""Tasks that end together: the first failure ends the others, and is raised as itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


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

"""The thread that one foreign environment lives in, with an event loop for its async methods."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class EnvironmentThread:
    """Runs calls one after another, always in the same thread; the caller waits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()

    def run(self, call: Callable[[], Any]) -> Any:
        """The call's value, awaited where it is a coroutine; raises what the call raises."""
        if self._pid != os.getpid():  # threads stay behind in the process that was forked
            self._begin()
        return self._executor.submit(self._run, call).result()

    def stop(self) -> None:
        """End the thread after the call that runs, without a wait."""
        self._executor.submit(self._close_loop)
        self._executor.shutdown(wait=False)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._executor = ThreadPoolExecutor(1, f"openenv {self._name}")
        self._loop: asyncio.AbstractEventLoop | None = None

    def _run(self, call: Callable[[], Any]) -> Any:
        value = call()
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:  # one for all calls: connections stay on the loop they began on
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(value))

    def _close_loop(self) -> None:
        if self._loop is not None:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._loop = None


async def _awaited(value: Any) -> Any:
    return await value

"""The thread of a foreign environment, with an event loop for its async methods."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class EnvironmentThread:
    """A thread that runs calls one after another while their callers wait."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start()

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a call, await its value if it is awaitable, and return the value."""
        if self._pid != os.getpid():  # a fork does not copy threads
            self._start()
        return self._executor.submit(self._run, call).result()

    def stop(self) -> None:
        """Stop the thread after the running call, without waiting for it."""
        self._executor.submit(self._close_loop)
        self._executor.shutdown(wait=False)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._executor = ThreadPoolExecutor(1, f"openenv {self._name}")
        self._loop: asyncio.AbstractEventLoop | None = None

    def _run(self, call: Callable[[], Any]) -> Any:
        value = call()
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:  # all calls share one loop, because connections belong to a loop
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_wait_for(value))

    def _close_loop(self) -> None:
        if self._loop is not None:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._loop = None


async def _wait_for(value: Any) -> Any:
    return await value

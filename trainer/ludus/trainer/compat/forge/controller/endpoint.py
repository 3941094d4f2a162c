"""`@endpoint`: a method with the calling conventions of Forge's actors.

    await actor.method.call_one(x)    the result           await service.method.route(x)
    await actor.method.call(x)        [the result]         await service.method.fanout(x)
    actor.method(x)                   a plain call

A part runs in this process. Its coroutines interleave on the event loop; other methods run in a
thread, one call at a time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

_LOCK = "_one_call_at_a_time"


class endpoint:
    """The decorator of an endpoint."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.__name__ = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else BoundEndpoint(self._function, instance)


class BoundEndpoint:
    """An endpoint of one part."""

    def __init__(self, function: Callable[..., Any], instance: Any) -> None:
        self._function = function
        self._instance = instance
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method directly."""
        return self._function(self._instance, *args, **kwargs)

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """Call the endpoint and return its result."""
        if inspect.iscoroutinefunction(self._function):
            return await self(*args, **kwargs)
        async with self._lock():
            return await asyncio.to_thread(partial(self, *args, **kwargs))

    async def call(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results of all processes, of which there is one."""
        return [await self.call_one(*args, **kwargs)]

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of one replica of a service."""
        return await self.call_one(*args, **kwargs)

    choose = route

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results of all replicas, of which there is one."""
        return await self.call(*args, **kwargs)

    def _lock(self) -> asyncio.Lock:
        lock: asyncio.Lock = self._instance.__dict__.setdefault(_LOCK, asyncio.Lock())
        return lock

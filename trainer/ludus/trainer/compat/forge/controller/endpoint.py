"""`@endpoint`: a method that is called as one of an actor of Forge's.

    await actor.method.call_one(x)    its answer           await service.method.route(x)
    await actor.method.call(x)        [its answer]         await service.method.fanout(x)
    actor.method(x)                   what the method returns, called as any other

A part lives in this process. Its coroutines interleave on the event loop; what else it does runs in
a thread, one call after the other.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

_LOCK = "_one_call_at_a_time"


class endpoint:
    """The decorator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.__name__ = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else BoundEndpoint(self._function, instance)


class BoundEndpoint:
    """The method of one part."""

    def __init__(self, function: Callable[..., Any], instance: Any) -> None:
        self._function = function
        self._instance = instance
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the method returns."""
        return self._function(self._instance, *args, **kwargs)

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """The answer of an actor."""
        if inspect.iscoroutinefunction(self._function):
            return await self(*args, **kwargs)
        async with self._lock():
            return await asyncio.to_thread(partial(self, *args, **kwargs))

    async def call(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The answers of all its processes, of which there is one."""
        return [await self.call_one(*args, **kwargs)]

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """The answer of one replica of a service."""
        return await self.call_one(*args, **kwargs)

    choose = route

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The answers of all replicas, of which there is one."""
        return await self.call(*args, **kwargs)

    def _lock(self) -> asyncio.Lock:
        lock: asyncio.Lock = self._instance.__dict__.setdefault(_LOCK, asyncio.Lock())
        return lock

"""Replicas of a part, as one service: `route` asks one of them, `fanout` all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from ludus.trainer.compat.forge.controller.endpoint import BoundEndpoint


class Service:
    """Replicas in this process, whose endpoints are called by their names."""

    def __init__(self, replicas: Sequence[Any]) -> None:
        self.replicas = replicas
        self._endpoints: dict[str, ServiceEndpoint] = {}

    def __getattr__(self, name: str) -> ServiceEndpoint:
        if name not in self._endpoints:
            bound = [getattr(replica, name) for replica in self.replicas]
            if not bound or not all(isinstance(one, BoundEndpoint) for one in bound):
                raise AttributeError(
                    f"a service is asked for endpoints of its replicas, and '{name}' is none; "
                    "`replicas` has the parts themselves"
                )
            self._endpoints[name] = ServiceEndpoint(bound)
        return self._endpoints[name]

    async def shutdown(self) -> None:
        """End what the replicas have started."""
        for replica in self.replicas:
            await replica.shutdown()


class ServiceEndpoint:
    """An endpoint of all replicas."""

    def __init__(self, bound: Sequence[BoundEndpoint]) -> None:
        self._bound = bound
        self._turns = itertools.cycle(bound)
        self.__doc__ = bound[0].__doc__

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """The answer of the replica whose turn it is."""
        return await next(self._turns).call_one(*args, **kwargs)

    choose = call_one = route

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The answers of all replicas, which are asked at the same time."""
        return list(await asyncio.gather(*(one.call_one(*args, **kwargs) for one in self._bound)))

    call = fanout

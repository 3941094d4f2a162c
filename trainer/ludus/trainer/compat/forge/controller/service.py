"""Replicas of a part as one service: `route` calls one replica, `fanout` calls all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from ludus.trainer.compat.forge.controller.endpoint import BoundEndpoint


class ReplicatedService:
    """Replicas in this process with a common set of endpoints."""

    def __init__(self, replicas: Sequence[Any]) -> None:
        self.replicas = replicas
        self._endpoints: dict[str, ServiceEndpoint] = {}

    def __getattr__(self, name: str) -> ServiceEndpoint:
        if name not in self._endpoints:
            bound = [getattr(replica, name) for replica in self.replicas]
            if not bound or not all(isinstance(method, BoundEndpoint) for method in bound):
                raise AttributeError(
                    f"'{name}' is not an endpoint of this service; its parts are in `replicas`"
                )
            self._endpoints[name] = ServiceEndpoint(bound)
        return self._endpoints[name]

    async def shutdown(self) -> None:
        """Shut down all replicas."""
        for replica in self.replicas:
            await replica.shutdown()


class ServiceEndpoint:
    """An endpoint of all replicas."""

    def __init__(self, bound: Sequence[BoundEndpoint]) -> None:
        self._bound = bound
        self._turns = itertools.cycle(bound)
        self.__doc__ = bound[0].__doc__

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Call the next replica in turn and return its result."""
        return await next(self._turns).call_one(*args, **kwargs)

    choose = call_one = route

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all replicas concurrently and return their results."""
        calls = (endpoint.call_one(*args, **kwargs) for endpoint in self._bound)
        return list(await asyncio.gather(*calls))

    call = fanout

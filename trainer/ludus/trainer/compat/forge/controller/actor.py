"""Parts of a training loop, with the calls of Forge's actors and services.

    await part.method.call_one(x)    the result           await service.method.route(x)
    await part.method.call(x)        [the result]         await service.method.fanout(x)
    part.method(x)                   a plain call

`options(...).as_actor(...)` and `.as_service(...)` create a part, or several replicas of it, in
this process. Its coroutines interleave on the event loop; other methods run in a thread, one call
at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

from ludus.proto.errors import ConfigError

ActorT = TypeVar("ActorT", bound="ForgeActor")
_SINGLE = ("procs", "hosts")
_OPTIONS = (*_SINGLE, "num_replicas", "with_gpus", "mesh_name")
_LOCK = "_one_call_at_a_time"


class endpoint:
    """The decorator of an endpoint."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else BoundEndpoint(self.function, [instance])


class BoundEndpoint:
    """An endpoint of a part, or of all replicas of a service."""

    def __init__(self, function: Callable[..., Any], replicas: Sequence[Any]) -> None:
        self._function = function
        self._replicas = replicas
        self._turns = itertools.cycle(replicas)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method directly."""
        return self._function(next(self._turns), *args, **kwargs)

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Call the next replica in turn and return its result."""
        return await self._call(next(self._turns), *args, **kwargs)

    choose = call_one = route

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all replicas concurrently and return their results."""
        calls = (self._call(replica, *args, **kwargs) for replica in self._replicas)
        return list(await asyncio.gather(*calls))

    call = fanout

    async def _call(self, replica: Any, *args: Any, **kwargs: Any) -> Any:
        function = partial(self._function, replica, *args, **kwargs)
        if inspect.iscoroutinefunction(self._function):
            return await function()
        async with vars(replica).setdefault(_LOCK, asyncio.Lock()):
            return await asyncio.to_thread(function)


class ReplicatedService:
    """Replicas of a part, which share their endpoints."""

    def __init__(self, replicas: Sequence[ForgeActor]) -> None:
        self.replicas = replicas

    def __getattr__(self, name: str) -> BoundEndpoint:
        method = getattr(type(self.replicas[0]), name, None)
        if not isinstance(method, endpoint):
            raise AttributeError(
                f"'{name}' is not an endpoint of this service; its parts are in `replicas`"
            )
        bound = vars(self)[name] = BoundEndpoint(method.function, self.replicas)
        return bound

    async def shutdown(self) -> None:
        """Shut down all replicas."""
        for replica in self.replicas:
            await replica.shutdown()


class ForgeActor:
    """A part. Slow initialization belongs in `setup`, a method or an endpoint."""

    replica, num_replicas = 0, 1
    """Index of this replica in its service, and number of replicas; set before `setup`."""

    @classmethod
    def options(cls, **options: Any) -> ActorOptions[Self]:
        """Set options of the part, which runs in this process, on a GPU if there is one."""
        names = sorted(options.keys() - set(_OPTIONS))
        if names:
            raise ConfigError(f"options supports {', '.join(_OPTIONS)}, got {', '.join(names)}")
        for name in _SINGLE:
            if options.get(name) not in (None, 0, 1):
                raise ConfigError(
                    f"{name} = {options[name]} must be 1, because the part runs in this process; "
                    "setup_forge_training runs several processes"
                )
        num_replicas = options.get("num_replicas") or 1
        if not isinstance(num_replicas, int) or num_replicas < 1:
            raise ConfigError(
                f"num_replicas = {num_replicas!r} must be a whole number of 1 or more"
            )
        return ActorOptions(cls, num_replicas)

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the part with the constructor's arguments and set it up."""
        return await cls.options().as_actor(*args, **kwargs)

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Any:
        """Create the part as a service with one replica."""
        return await cls.options().as_actor(*args, **kwargs)

    async def shutdown(self) -> None:
        """Stop everything the part has started."""


@dataclass(frozen=True, slots=True)
class ActorOptions(Generic[ActorT]):
    """Options of a part that has not been created yet."""

    _part: type[ActorT]
    _num_replicas: int

    async def as_actor(self, *args: Any, **kwargs: Any) -> ActorT:
        """Create and set up the part; see ForgeActor.as_actor."""
        if self._num_replicas > 1:
            raise ConfigError(
                f"num_replicas = {self._num_replicas} must be 1 for an actor; call as_service"
            )
        [part] = await self._create_replicas(*args, **kwargs)
        return part

    async def as_service(self, *args: Any, **kwargs: Any) -> Any:
        """Create the part, or a ReplicatedService if there are several replicas."""
        replicas = await self._create_replicas(*args, **kwargs)
        return replicas[0] if len(replicas) == 1 else ReplicatedService(replicas)

    async def _create_replicas(self, *args: Any, **kwargs: Any) -> list[ActorT]:
        replicas: list[ActorT] = []
        try:
            for index in range(self._num_replicas):
                part = self._part(*args, **kwargs)
                part.replica, part.num_replicas = index, self._num_replicas
                result = part.setup() if hasattr(part, "setup") else None
                if inspect.isawaitable(result):
                    await result
                replicas.append(part)
        except BaseException:
            await ReplicatedService(replicas).shutdown()
            raise
        return replicas

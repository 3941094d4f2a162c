"""Actors for a training loop, with the call interface of Forge's actors and services.

    await actor.method.call_one(x)   the result           await service.method.route(x)
    await actor.method.call(x)       [the result]         await service.method.fanout(x)
    actor.method(x)                  a direct call

`options(...).as_actor(...)` and `.as_service(...)` create an actor, or several replicas of it, in
this process. Coroutines of an actor interleave on the event loop. Its other methods run in a
thread, one call at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

from ludus.proto.config.section import PositiveInt
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.checks import check_value

ActorT = TypeVar("ActorT", bound="ForgeActor")
_SINGLE_PROCESS_OPTIONS = ("procs", "hosts")
_SUPPORTED_OPTIONS = (*_SINGLE_PROCESS_OPTIONS, "num_replicas", "with_gpus", "mesh_name")
_LOCK_ATTRIBUTE = "_call_lock"


class endpoint:
    """A decorator that makes a method an endpoint."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else BoundEndpoint(self.function, [instance])


class BoundEndpoint:
    """An endpoint of an actor, or of all replicas of a service."""

    def __init__(self, function: Callable[..., Any], replicas: Sequence[Any]) -> None:
        self._function = function
        self._replicas = replicas
        self._next_replicas = itertools.cycle(replicas)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method directly."""
        return self._function(next(self._next_replicas), *args, **kwargs)

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Call the next replica in turn and return its result."""
        return await self._call(next(self._next_replicas), *args, **kwargs)

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
        async with vars(replica).setdefault(_LOCK_ATTRIBUTE, asyncio.Lock()):
            return await asyncio.to_thread(function)


class ReplicatedService:
    """Replicas of an actor, which are called through common endpoints."""

    def __init__(self, replicas: Sequence[ForgeActor]) -> None:
        self.replicas = replicas

    def __getattr__(self, name: str) -> BoundEndpoint:
        method = getattr(type(self.replicas[0]), name, None)
        if not isinstance(method, endpoint):
            raise AttributeError(
                f"'{name}' is not an endpoint of this service; its actors are in `replicas`"
            )
        bound_endpoint = vars(self)[name] = BoundEndpoint(method.function, self.replicas)
        return bound_endpoint

    async def shutdown(self) -> None:
        """Shut down all replicas."""
        for replica in self.replicas:
            await replica.shutdown()


class ForgeActor:
    """Base class of actors. Slow initialization belongs in `setup`, a method or an endpoint."""

    replica, num_replicas = 0, 1
    """Index of this replica in its service, and number of replicas; set before `setup`."""

    @classmethod
    def options(cls, **options: Any) -> ActorOptions[Self]:
        """Return options that create the actor in this process, on a GPU if there is one."""
        unknown_names = sorted(options.keys() - set(_SUPPORTED_OPTIONS))
        if unknown_names:
            raise ConfigError(
                f"options() does not support {', '.join(unknown_names)}; use "
                f"{', '.join(_SUPPORTED_OPTIONS)}"
            )
        for name in _SINGLE_PROCESS_OPTIONS:
            if options.get(name) not in (None, 0, 1):
                raise ConfigError(
                    f"{name} = {options[name]} must be 1, because the actor runs in this process; "
                    "setup_forge_training runs several processes"
                )
        num_replicas = options.get("num_replicas") or 1
        return ActorOptions(cls, check_value("num_replicas", PositiveInt, num_replicas))

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the actor with the constructor's arguments and set it up."""
        return await cls.options().as_actor(*args, **kwargs)

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Any:
        """Create the actor as a service with one replica."""
        return await cls.options().as_actor(*args, **kwargs)

    async def shutdown(self) -> None:
        """Stop everything that the actor has started."""


@dataclass(frozen=True, slots=True)
class ActorOptions(Generic[ActorT]):
    """Options of an actor that has not been created yet."""

    _actor_class: type[ActorT]
    _num_replicas: int

    async def as_actor(self, *args: Any, **kwargs: Any) -> ActorT:
        """Create and set up the actor; see ForgeActor.as_actor."""
        if self._num_replicas > 1:
            raise ConfigError(
                f"num_replicas = {self._num_replicas} must be 1 for an actor; call as_service"
            )
        [actor] = await self._create_replicas(*args, **kwargs)
        return actor

    async def as_service(self, *args: Any, **kwargs: Any) -> Any:
        """Create the actor, or a ReplicatedService if there are several replicas."""
        replicas = await self._create_replicas(*args, **kwargs)
        return replicas[0] if len(replicas) == 1 else ReplicatedService(replicas)

    async def _create_replicas(self, *args: Any, **kwargs: Any) -> list[ActorT]:
        replicas: list[ActorT] = []
        try:
            for index in range(self._num_replicas):
                actor = self._actor_class(*args, **kwargs)
                actor.replica, actor.num_replicas = index, self._num_replicas
                setup_result = actor.setup() if hasattr(actor, "setup") else None
                if inspect.isawaitable(setup_result):
                    await setup_result
                replicas.append(actor)
        except BaseException:
            await ReplicatedService(replicas).shutdown()
            raise
        return replicas

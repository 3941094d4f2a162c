"""Base class of parts, created by `options(...).as_actor(...)` or `.as_service(...)`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.controller.endpoint import BoundEndpoint
from ludus.trainer.compat.forge.controller.service import ReplicatedService

ActorT = TypeVar("ActorT", bound="ForgeActor")
_SINGLE = ("procs", "hosts")
_OPTIONS = (*_SINGLE, "num_replicas", "with_gpus", "mesh_name")


class ForgeActor:
    """A part. Slow initialization belongs in `setup`, a method or an endpoint."""

    replica, num_replicas = 0, 1
    """Index of this replica in its service, and number of replicas; set before `setup`."""

    @classmethod
    def options(cls, **options: Any) -> ActorOptions[Self]:
        """Set options of the part, which runs in this process, on a GPU if there is one.

        Raises:
            ConfigError: an option is unknown or out of range, or asks for several processes.
        """
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
        return await _set_up(cls(*args, **kwargs))

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Any:
        """Create the part as a service with one replica."""
        return await cls.as_actor(*args, **kwargs)

    async def shutdown(self) -> None:
        """Stop everything the part has started."""


@dataclass(frozen=True, slots=True)
class ActorOptions(Generic[ActorT]):
    """Options of a part that has not been created yet."""

    _part: type[ActorT]
    _num_replicas: int

    async def as_actor(self, *args: Any, **kwargs: Any) -> ActorT:
        """Create and set up the part; see ForgeActor.as_actor.

        Raises:
            ConfigError: several replicas are requested, which only a service supports.
        """
        if self._num_replicas > 1:
            raise ConfigError(
                f"num_replicas = {self._num_replicas} must be 1 for an actor; call as_service"
            )
        return await self._part.as_actor(*args, **kwargs)

    async def as_service(self, *args: Any, **kwargs: Any) -> Any:
        """Create the part, or a ReplicatedService if there are several replicas."""
        if self._num_replicas == 1:
            return await self._part.as_service(*args, **kwargs)
        replicas: list[ActorT] = []
        try:
            for index in range(self._num_replicas):
                part = self._part(*args, **kwargs)
                part.replica, part.num_replicas = index, self._num_replicas
                replicas.append(await _set_up(part))
        except BaseException:
            await ReplicatedService(replicas).shutdown()
            raise
        return ReplicatedService(replicas)


async def _set_up(part: ActorT) -> ActorT:
    setup = getattr(part, "setup", None)
    if isinstance(setup, BoundEndpoint):
        await setup.call_one()
    elif setup is not None:
        result = setup()
        if inspect.isawaitable(result):
            await result
    return part

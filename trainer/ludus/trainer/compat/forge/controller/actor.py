"""The base of parts, which are made by `options(...).as_actor(...)` or `.as_service(...)`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.controller.endpoint import BoundEndpoint
from ludus.trainer.compat.forge.controller.service import Service

ActorT = TypeVar("ActorT", bound="ForgeActor")
_ONE = ("procs", "hosts")
_OPTIONS = (*_ONE, "num_replicas", "with_gpus", "mesh_name")


class ForgeActor:
    """A part. What it needs a while for is in `setup`, a method or an endpoint."""

    replica, num_replicas = 0, 1
    """Which replica of a service the part is, of how many; known before `setup`."""

    @classmethod
    def options(cls, **options: Any) -> ActorOptions[Self]:
        """Makes the part; it lives in this process, on a GPU where there is one.

        Raises:
            ConfigError: options that Forge does not have, more than one process, or a number of
                replicas that is none.
        """
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise ConfigError(f"options expected {', '.join(_OPTIONS)}, got {', '.join(unknown)}")
        for name in _ONE:
            if options.get(name) not in (None, 0, 1):
                raise ConfigError(
                    f"{name} = {options[name]}: expected 1, since a part by its name lives in this "
                    "process; setup_forge_training spreads a run over processes"
                )
        num_replicas = options.get("num_replicas") or 1
        if not isinstance(num_replicas, int) or num_replicas < 1:
            raise ConfigError(f"num_replicas = {num_replicas!r}: expected a whole number from 1")
        return ActorOptions(cls, num_replicas)

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> Self:
        """The part, set up; arguments are its constructor's."""
        return await _set_up(cls(*args, **kwargs))

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Any:
        """The same: without `options` a service has one replica."""
        return await cls.as_actor(*args, **kwargs)

    async def shutdown(self) -> None:
        """End what the part has started."""


@dataclass(frozen=True, slots=True)
class ActorOptions(Generic[ActorT]):
    """What `options` returns."""

    _part: type[ActorT]
    _num_replicas: int

    async def as_actor(self, *args: Any, **kwargs: Any) -> ActorT:
        """See ForgeActor.as_actor.

        Raises:
            ConfigError: replicas were asked for, which a service alone has.
        """
        if self._num_replicas > 1:
            raise ConfigError(
                f"num_replicas = {self._num_replicas}: expected 1 for an actor; call as_service"
            )
        return await self._part.as_actor(*args, **kwargs)

    async def as_service(self, *args: Any, **kwargs: Any) -> Any:
        """The part; of several replicas a Service, which has the part's endpoints."""
        if self._num_replicas == 1:
            return await self._part.as_service(*args, **kwargs)
        replicas: list[ActorT] = []
        try:
            for number in range(self._num_replicas):
                part = self._part(*args, **kwargs)
                part.replica, part.num_replicas = number, self._num_replicas
                replicas.append(await _set_up(part))
        except BaseException:
            await Service(replicas).shutdown()
            raise
        return Service(replicas)


async def _set_up(part: ActorT) -> ActorT:
    setup = getattr(part, "setup", None)
    if isinstance(setup, BoundEndpoint):
        await setup.call_one()
    elif setup is not None:
        done = setup()
        if inspect.isawaitable(done):
            await done
    return part

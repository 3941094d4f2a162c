"""The base of parts, which are made by `options(...).as_actor(...)` or `.as_service(...)`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.controller.endpoint import BoundEndpoint

ActorT = TypeVar("ActorT", bound="ForgeActor")
_COUNTS = ("procs", "num_replicas", "hosts")
_OPTIONS = (*_COUNTS, "with_gpus", "mesh_name")


class ForgeActor:
    """A part. What it needs a while for is in `setup`, a method or an endpoint."""

    @classmethod
    def options(cls, **options: Any) -> ActorOptions[Self]:
        """Makes the part; it lives in this process, on a GPU where there is one.

        Raises:
            ConfigError: options that Forge does not have, or more than one process.
        """
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise ConfigError(f"options expected {', '.join(_OPTIONS)}, got {', '.join(unknown)}")
        for name in _COUNTS:
            if options.get(name) not in (None, 0, 1):
                raise ConfigError(
                    f"{name} = {options[name]}: expected 1, since a part by its name lives in this "
                    "process; setup_forge_training spreads a run over processes"
                )
        return ActorOptions(cls)

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> Self:
        """The part, set up; arguments are its constructor's."""
        part = cls(*args, **kwargs)
        setup = getattr(part, "setup", None)
        if isinstance(setup, BoundEndpoint):
            await setup.call_one()
        elif setup is not None:
            done = setup()
            if inspect.isawaitable(done):
                await done
        return part

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Self:
        """The same: a service here has one replica."""
        return await cls.as_actor(*args, **kwargs)

    async def shutdown(self) -> None:
        """End what the part has started."""


@dataclass(frozen=True, slots=True)
class ActorOptions(Generic[ActorT]):
    """What `options` returns."""

    _part: type[ActorT]

    async def as_actor(self, *args: Any, **kwargs: Any) -> ActorT:
        """See ForgeActor.as_actor."""
        return await self._part.as_actor(*args, **kwargs)

    async def as_service(self, *args: Any, **kwargs: Any) -> ActorT:
        """See ForgeActor.as_service."""
        return await self._part.as_service(*args, **kwargs)

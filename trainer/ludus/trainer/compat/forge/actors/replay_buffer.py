"""A replay buffer that forgets what is too old."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.controller.actor import ForgeActor
from ludus.trainer.compat.forge.controller.endpoint import endpoint
from ludus.trainer.core.streams import Stream, make_random


@dataclass
class ReplayBuffer(ForgeActor):
    """Episodes, each given out once, at random, while it is not older than `max_policy_age`."""

    batch_size: int
    """Episodes for one data-parallel rank."""
    max_policy_age: int
    """Versions between the weights that played an episode and those that it trains."""
    dp_size: int = 1
    """Data-parallel ranks."""
    collate: Callable[[list[list[Any]]], Any] | None = None
    """Makes what the ranks train on of their episodes [dp_size, batch_size]."""
    seed: int = 0
    _episodes: list[Any] = field(default_factory=list, init=False)

    def setup(self) -> None:
        """Take the random numbers of the seed.

        Raises:
            ConfigError: a number can be none of such a buffer.
        """
        for name, least in (("batch_size", 1), ("dp_size", 1), ("max_policy_age", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"ReplayBuffer({name}={value!r}) expected a whole number of {least} or more"
                )
        self._draw = make_random(self.seed, Stream.REPLAY_BUFFER)

    @endpoint
    async def add(self, episode: Any) -> None:
        """Keep an episode, which has a `policy_version`.

        Raises:
            ConfigError: it has none.
        """
        version = getattr(episode, "policy_version", None)
        if not isinstance(version, int):
            raise ConfigError(f"episode expected a whole policy_version, got {version!r}")
        self._episodes.append(episode)

    @endpoint
    async def sample(self, curr_policy_version: int, batch_size: int | None = None) -> Any:
        """Episodes for each rank, or what `collate` makes of them; None while there are too few.

        Args:
            batch_size: in place of the buffer's own.
        """
        self._forget(curr_policy_version)
        size = batch_size or self.batch_size
        wanted = self.dp_size * size
        if len(self._episodes) < wanted:
            return None
        places = self._draw.sample(range(len(self._episodes)), wanted)
        taken = [self._episodes[place] for place in places]
        gone = set(places)
        self._episodes = [one for place, one in enumerate(self._episodes) if place not in gone]
        batches = [taken[rank * size : (rank + 1) * size] for rank in range(self.dp_size)]
        return batches if self.collate is None else self.collate(batches)

    @endpoint
    async def evict(self, curr_policy_version: int) -> None:
        """Forget what is too old."""
        self._forget(curr_policy_version)

    @endpoint
    async def clear(self) -> None:
        """Forget all."""
        self._episodes = []

    @endpoint
    async def size(self) -> int:
        """Episodes that are kept."""
        return len(self._episodes)

    def _forget(self, version: int) -> None:
        oldest = version - self.max_policy_age
        self._episodes = [one for one in self._episodes if one.policy_version >= oldest]

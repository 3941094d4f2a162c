"""Forge's ReplayBuffer, which drops stale episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ludus.proto.config.section import NonNegativeInt, PositiveInt
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.checks import check_value
from ludus.trainer.compat.forge.controller.actor import ForgeActor, endpoint
from ludus.trainer.core.streams import Stream, make_random


@dataclass
class ReplayBuffer(ForgeActor):
    """A buffer of episodes, which samples each episode at most once, in random order.

    Episodes that are older than `max_policy_age` are dropped.
    """

    batch_size: int
    """Number of episodes per data-parallel rank."""
    max_policy_age: int
    """Maximum difference between the trained version and the version that played an episode."""
    dp_size: int = 1
    """Number of data-parallel ranks."""
    collate: Callable[[list[list[Any]]], Any] | None = None
    """Function from episodes [dp_size, batch_size] to training input."""
    seed: int = 0
    _episodes: list[Any] = field(default_factory=list, init=False)

    def setup(self) -> None:
        """Check the settings and create the random generator."""
        check_value("batch_size", PositiveInt, self.batch_size)
        check_value("dp_size", PositiveInt, self.dp_size)
        check_value("max_policy_age", NonNegativeInt, self.max_policy_age)
        self._random = make_random(self.seed, Stream.REPLAY_BUFFER)

    @endpoint
    async def add(self, episode: Any) -> None:
        """Add an episode."""
        version = getattr(episode, "policy_version", None)
        if not isinstance(version, int):
            raise ConfigError(f"episode.policy_version must be a whole number, got {version!r}")
        self._episodes.append(episode)

    @endpoint
    async def sample(self, curr_policy_version: int, batch_size: int | None = None) -> Any:
        """Sample episodes for each rank and collate them; return None if there are too few.

        Args:
            batch_size: override of the buffer's batch size.
        """
        self._drop_stale_episodes(curr_policy_version)
        rank_batch_size = batch_size or self.batch_size
        num_episodes = self.dp_size * rank_batch_size
        if len(self._episodes) < num_episodes:
            return None
        indices = self._random.sample(range(len(self._episodes)), num_episodes)
        sampled_episodes = [self._episodes[index] for index in indices]
        removed_indices = set(indices)
        self._episodes = [
            episode for index, episode in enumerate(self._episodes) if index not in removed_indices
        ]
        batches = [
            sampled_episodes[rank * rank_batch_size : (rank + 1) * rank_batch_size]
            for rank in range(self.dp_size)
        ]
        return batches if self.collate is None else self.collate(batches)

    @endpoint
    async def evict(self, curr_policy_version: int) -> None:
        """Drop stale episodes."""
        self._drop_stale_episodes(curr_policy_version)

    @endpoint
    async def clear(self) -> None:
        """Drop all episodes."""
        self._episodes = []

    @endpoint
    async def size(self) -> int:
        """Return the number of episodes."""
        return len(self._episodes)

    def _drop_stale_episodes(self, version: int) -> None:
        cutoff = version - self.max_policy_age
        self._episodes = [episode for episode in self._episodes if episode.policy_version >= cutoff]

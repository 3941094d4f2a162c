"""The one interface to all ways of playing the episodes of an environment, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from ludus.env.client import AsyncEnvClient
from ludus.proto.config import EnvironmentConfig, LanguageModelRun, RolloutConfig
from ludus.trainer.core.types import Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """An episode that is about to be played."""

    group: int
    """Index of its group. The episodes of a group are adjacent."""
    seed: int
    key: int
    """Key of the random numbers that its completions are sampled with."""


class EpisodeRunner(Protocol):
    """A way to play the episodes of one environment."""

    @property
    def plays_groups_together(self) -> bool:
        """True if one call plays all groups that a worker has received, instead of one group."""

    async def play_episodes(
        self, starts: Sequence[EpisodeStart], sampling: Sampling, *, is_evaluation: bool
    ) -> list[PlayedEpisode]:
        """Play the episodes at the same time and return them in their order.

        An episode that fails, or does not end within `rollout.group_timeout_s`, is void.

        Raises:
            UserError: the run cannot work as configured.
        """


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The components of a rollout worker from which it starts the runner of one environment."""

    run: LanguageModelRun
    environment: str
    """Name of the environment in the run."""
    client: AsyncEnvClient
    engine: AsyncEngine
    chat: ChatTokenizer
    stack: AsyncExitStack
    """Closes what the runner opens when the worker closes."""
    worker_index: int = 0

    @property
    def config(self) -> EnvironmentConfig:
        return self.run.environments[self.environment]

    @property
    def limits(self) -> RolloutConfig:
        return episode_limits(self.run, self.environment)


def episode_limits(run: LanguageModelRun, environment: str) -> RolloutConfig:
    """Return the run's rollout settings with the limits that `environment` replaces."""
    config = run.environments[environment]
    limits = {
        "max_turns": config.max_turns,
        "max_tokens": config.max_tokens,
        "max_completion_tokens": config.max_completion_tokens,
    }
    return run.rollout.model_copy(
        update={name: limit for name, limit in limits.items() if limit is not None}
    )


def sampling_settings(limits: RolloutConfig, temperature: float | None = None) -> Sampling:
    """Return the settings for one completion; None keeps the temperature of the rollouts."""
    return Sampling(
        temperature=limits.temperature if temperature is None else temperature,
        max_tokens=limits.max_completion_tokens,
        top_p=limits.top_p,
        top_k=limits.top_k,
        min_p=limits.min_p,
        repetition_penalty=limits.repetition_penalty,
    )

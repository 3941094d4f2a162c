"""The interface of all runners, which play the episodes of an environment, and their limits."""

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
    """The seed and key with which an episode starts."""

    group_index: int
    """Index of the episode's group. The starts of a group are adjacent in a sequence."""
    seed: int
    key: int
    """Key from which the seed of each completion is derived."""


class EpisodeRunner(Protocol):
    """A way to play the episodes of one environment."""

    @property
    def plays_groups_together(self) -> bool:
        """True if one call of `play_episodes` can play several groups; False if it plays one."""

    async def play_episodes(
        self, starts: Sequence[EpisodeStart], sampling: Sampling, *, is_evaluation: bool
    ) -> list[PlayedEpisode]:
        """Play the episodes concurrently and return them in the order of their starts.

        An episode is void if it fails or does not end within `rollout.group_timeout_s`.

        Raises:
            UserError: the run cannot work as configured.
        """


@dataclass(frozen=True, slots=True)
class RunnerComponents:
    """The components of a rollout worker that the runner of one environment uses."""

    run: LanguageModelRun
    environment: str
    """Name of the environment in the run."""
    client: AsyncEnvClient
    engine: AsyncEngine
    chat: ChatTokenizer
    stack: AsyncExitStack
    """Exit stack that closes the runner's resources when the worker closes."""
    worker_index: int = 0

    @property
    def config(self) -> EnvironmentConfig:
        return self.run.environments[self.environment]

    @property
    def limits(self) -> RolloutConfig:
        return episode_limits(self.run, self.environment)


def episode_limits(run: LanguageModelRun, environment: str) -> RolloutConfig:
    """Return the run's rollout settings, in which the environment's own limits take precedence."""
    config = run.environments[environment]
    names = {"max_turns", "max_tokens", "max_completion_tokens", "invalid_action_reward"}
    return run.rollout.model_copy(update=config.model_dump(include=names, exclude_none=True))


def sampling_settings(limits: RolloutConfig, temperature: float | None = None) -> Sampling:
    """Return the sampling parameters of a completion. None selects the temperature in `limits`."""
    return Sampling(
        temperature=limits.temperature if temperature is None else temperature,
        max_tokens=limits.max_completion_tokens,
        top_p=limits.top_p,
        top_k=limits.top_k,
        min_p=limits.min_p,
        repetition_penalty=limits.repetition_penalty,
    )

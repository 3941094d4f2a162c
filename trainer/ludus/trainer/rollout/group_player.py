"""What plays the groups of one environment on a rollout worker.

episode by episode   `Player`, one conversation each            rollout/group.py
in one call          a rollout function that takes many         rollout/batch/
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ludus.env.client import AsyncEnvClient
from ludus.proto.config import LanguageModelRun
from ludus.trainer.core.types import GroupSpec, Rollout, RolloutGroup, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.batch.completions import Completions
from ludus.trainer.rollout.batch.function import BatchFunction
from ludus.trainer.rollout.batch.player import BatchPlayer
from ludus.trainer.rollout.episode import Agent, Player
from ludus.trainer.rollout.generator import Generator
from ludus.trainer.rollout.group import play_group
from ludus.trainer.rollout.player import limits_of, make_player
from ludus.trainer.rollout.renderer import make_renderer
from ludus.trainer.rollout.reward_models import RewardModels
from ludus.trainer.rollout.rewards import Reward


class GroupPlayer(Protocol):
    """Plays groups, and single games of an evaluation, of one environment."""

    async def play_groups(
        self, specs: Sequence[GroupSpec], sampling: Sampling, num_transcripts: Sequence[int]
    ) -> list[RolloutGroup]:
        """The groups with their rewards, in their order.

        Args:
            num_transcripts: of so many episodes each group says what was said.

        Raises:
            UserError: the run cannot work as configured.
        """

    async def play_games(self, seeds: Sequence[int], sampling: Sampling) -> list[Rollout]:
        """One episode per seed, in their order."""


@dataclass(frozen=True, slots=True)
class EpisodePlayer:
    """Plays every episode by itself, all of them side by side."""

    player: Player
    group_timeout_s: float
    max_games: int
    """Of an evaluation, at once."""

    async def play_groups(
        self, specs: Sequence[GroupSpec], sampling: Sampling, num_transcripts: Sequence[int]
    ) -> list[RolloutGroup]:
        """See GroupPlayer."""
        groups = [
            play_group(self.player, spec, sampling, self.group_timeout_s, num_transcripts=number)
            for spec, number in zip(specs, num_transcripts, strict=True)
        ]
        return list(await asyncio.gather(*groups))

    async def play_games(self, seeds: Sequence[int], sampling: Sampling) -> list[Rollout]:
        """See GroupPlayer."""
        slots = asyncio.Semaphore(self.max_games)

        async def play(seed: int) -> Rollout:
            async with slots:
                return await self.player.play(seed, sampling)

        return list(await asyncio.gather(*(play(seed) for seed in seeds)))


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What all environments of a worker share."""

    generator: Generator
    chat: ChatTokenizer
    reward_models: RewardModels
    completions: Completions
    port: int | None
    """Where the worker answers POST /generate/; None where it does not."""


async def make_group_player(
    run: LanguageModelRun,
    name: str,
    client: AsyncEnvClient,
    parts: WorkerParts,
    agent: Agent | None = None,
) -> GroupPlayer:
    """What plays environment `name` of the run.

    Args:
        agent: that of the environment, where it has one.

    Raises:
        ConfigError: a function that the environment names cannot be imported, or has no form that
            is known.
    """
    config, rollout = run.environments[name], run.rollout
    generator, chat = parts.generator, parts.chat
    if config.plays_in_batches:
        assert config.rollout_function is not None
        function = BatchFunction(
            config.rollout_function,
            run,
            limits_of(run, name),
            generator,
            parts.completions,
            chat,
            parts.port,
        )
        reward = Reward(config.rewards, rollout.invalid_action_reward, parts.reward_models)
        return BatchPlayer(run, name, client, make_renderer(config), chat, function, reward)
    max_sessions = (await client.describe()).max_sessions
    return EpisodePlayer(
        make_player(
            run,
            name,
            client,
            generator,
            chat,
            max_sessions,
            agent=agent,
            reward_models=parts.reward_models,
        ),
        rollout.group_timeout_s,
        rollout.num_groups_in_flight * rollout.group_size,
    )

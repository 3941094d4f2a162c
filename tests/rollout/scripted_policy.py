"""A policy with scripted completions, and players that use it instead of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.env.client import AsyncEnvClient
from ludus.proto.config import LanguageModelRun, RolloutConfig
from ludus.trainer.core.interfaces import GenerateFunction
from ludus.trainer.core.types import GroupSpec, Rollout, RolloutGroup, SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.adapters.environment_adapter import ServerRenderer
from ludus.trainer.rollout.episode import (
    FunctionRunner,
    RolloutFunction,
    SessionRunner,
    TurnLoopRunner,
)
from ludus.trainer.rollout.group import GroupPlayer
from ludus.trainer.rollout.rewards.reward_models import RewardModels
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode, Reward
from ludus.trainer.rollout.runner import EpisodeStart, RunnerComponents

SAMPLING = Sampling(temperature=1.0, max_tokens=8)
LIMITS = RolloutConfig(max_completion_tokens=8, max_tokens=256)


class ScriptedPolicy:
    """A policy that returns scripted texts. A text that ends with "..." has no EOS token."""

    def __init__(
        self, chat: ChatTokenizer, script: Iterator[str], on_call: Callable[[], None] | None = None
    ) -> None:
        self._chat = chat
        self.script = script
        """Texts of the next completions."""
        self.replacement: GenerateFunction | None = None
        """Function to call instead of using the script."""
        self._on_call = on_call
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []
        self.version = 0

    async def __call__(
        self, prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> SampledCompletion:
        """Return the next completion, in which each token has log-prob -1."""
        await asyncio.sleep(0)
        self.prompts.append(list(prompt_ids))
        self.seeds.append(seed)
        if self._on_call is not None:
            self._on_call()
        if self.replacement is not None:
            return await self.replacement(prompt_ids, sampling, seed)
        text = next(self.script)
        token_ids = self._chat.encode_completion(text.removesuffix("..."))
        has_end_token = not text.endswith("...")
        token_ids = token_ids if has_end_token else token_ids[:-1]
        return SampledCompletion(token_ids, [-1.0] * len(token_ids), self.version, has_end_token)


@dataclass(frozen=True)
class ScriptedPlayer:
    """A player of groups and single episodes with one runner."""

    runner: SessionRunner[Any]
    reward: Reward = field(default_factory=Reward)
    run_seed: int = 0
    environment_index: int = 0

    def replace_fields(self, **fields: Any) -> ScriptedPlayer:
        """Return a copy of the player with these fields of its runner replaced."""
        return replace(self, runner=replace(self.runner, **fields))

    async def play_group(
        self, spec: GroupSpec, timeout_s: float = 60.0, num_transcripts: int = 0
    ) -> RolloutGroup:
        """Play one group within a time limit."""
        [group] = await self._make_player(timeout_s).play_groups(
            [spec], SAMPLING, [num_transcripts]
        )
        return group

    async def play_episode(self, seed: int, timeout_s: float = 60.0) -> Rollout:
        """Play one evaluation episode within a time limit."""
        [rollout] = await self.play_episodes([seed], timeout_s)
        return rollout

    async def play_episodes(self, seeds: Sequence[int], timeout_s: float = 60.0) -> list[Rollout]:
        """Play evaluation episodes, with a time limit for each episode."""
        return await self._make_player(timeout_s).evaluate(seeds, SAMPLING)

    def _make_player(self, timeout_s: float) -> GroupPlayer:
        limits = self.runner.limits.model_copy(update={"group_timeout_s": timeout_s})
        return GroupPlayer(
            replace(self.runner, limits=limits),
            self.reward,
            timeout_s,
            max_evaluation_episodes=8,
            run_seed=self.run_seed,
            environment_index=self.environment_index,
        )


def make_runner(
    client: AsyncEnvClient,
    chat: ChatTokenizer,
    generate: Any,
    limits: RolloutConfig = LIMITS,
    function: RolloutFunction | None = None,
    **fields: Any,
) -> SessionRunner[Any]:
    """Return a turn loop, or the runner of `function`; `fields` are more fields of the runner."""
    settings: dict[str, Any] = {
        "environment": "game",
        "client": client,
        "generate": generate,
        "chat": chat,
        "renderer": ServerRenderer("game"),
        "limits": limits,
        **fields,
    }
    if function is not None:
        return FunctionRunner(function=function, **settings)
    return TurnLoopRunner(**settings)


async def start_player(
    run: LanguageModelRun,
    environment: str,
    client: AsyncEnvClient,
    generate: Any,
    chat: ChatTokenizer,
) -> GroupPlayer:
    """Return the player of the environment that the run configures."""
    components = RunnerComponents(run, environment, client, generate, chat, AsyncExitStack())
    return await GroupPlayer.start(components, RewardModels())


async def play_once(
    runner: SessionRunner[Any], seed: int, sampling: Sampling = SAMPLING
) -> PlayedEpisode:
    """Play one evaluation episode, with sampling seeds derived from key 0."""
    episode_start = EpisodeStart(0, seed, key=0)
    [episode] = await runner.play_episodes([episode_start], sampling, is_evaluation=True)
    return episode


def make_player(
    client: AsyncEnvClient,
    chat: ChatTokenizer,
    script: Iterator[str],
    limits: RolloutConfig = LIMITS,
    on_call: Callable[[], None] | None = None,
    *,
    reward: Reward | None = None,
    run_seed: int = 0,
    environment_index: int = 0,
    **fields: Any,
) -> tuple[ScriptedPlayer, ScriptedPolicy]:
    """Return a player and its scripted policy; `fields` are more fields of the runner."""
    policy = ScriptedPolicy(chat, script, on_call)
    runner = make_runner(client, chat, policy, limits, **fields)
    player = ScriptedPlayer(runner, reward or Reward(), run_seed, environment_index)
    return player, policy

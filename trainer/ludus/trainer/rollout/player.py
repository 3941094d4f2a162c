"""A player for an environment of a run, made from its configuration."""

from __future__ import annotations

from ludus.env.client import AsyncEnvClient
from ludus.proto.config import LanguageModelRun, RolloutConfig
from ludus.trainer.core.functions import import_object
from ludus.trainer.core.interfaces import GenerateFn
from ludus.trainer.core.types import Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.episode import Agent, Player
from ludus.trainer.rollout.renderer import make_renderer
from ludus.trainer.rollout.reward_models import RewardModels
from ludus.trainer.rollout.rewards import Reward
from ludus.trainer.rollout.tool_adapter import Toolbox


def make_player(
    run: LanguageModelRun,
    name: str,
    client: AsyncEnvClient,
    generate: GenerateFn,
    chat: ChatTokenizer,
    max_sessions: int,
    *,
    agent: Agent | None = None,
    reward_models: RewardModels | None = None,
) -> Player:
    """What plays environment `name` of the run, and scores what it has played.

    Args:
        agent: that of the environment, where it has one.
        reward_models: those of this process, which all environments share.

    Raises:
        ConfigError: a function that the environment names cannot be imported.
    """
    config = run.environments[name]
    play = config.rollout_function
    return Player(
        environment=name,
        client=client,
        generate=generate,
        chat=chat,
        renderer=make_renderer(config),
        limits=limits_of(run, name),
        max_sessions=max_sessions,
        resumes=config.resume,
        run_seed=run.seed,
        place=list(run.environments).index(name),
        toolbox=Toolbox(client, name) if config.tools else None,
        rollout_function=None if play is None else import_object(play, "environment.rollout"),
        agent=agent,
        reward=Reward(config.rewards, run.rollout.invalid_action_reward, reward_models),
    )


def limits_of(run: LanguageModelRun, name: str) -> RolloutConfig:
    """How episodes of environment `name` are played: what it does not say, `rollout` says."""
    config = run.environments[name]
    own = {
        "max_turns": config.max_turns,
        "max_tokens": config.max_tokens,
        "max_completion_tokens": config.max_completion_tokens,
    }
    return run.rollout.model_copy(update={k: v for k, v in own.items() if v is not None})


def sampling_of(limits: RolloutConfig, temperature: float | None = None) -> Sampling:
    """How one answer is sampled; of another temperature where one is given."""
    return Sampling(
        temperature=limits.temperature if temperature is None else temperature,
        max_tokens=limits.max_completion_tokens,
        top_p=limits.top_p,
        top_k=limits.top_k,
        min_p=limits.min_p,
        repetition_penalty=limits.repetition_penalty,
    )

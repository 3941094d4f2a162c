"""`train_agent`: Gymformer's call, for networks and for language models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ludus.trainer.compat.gymformer.arguments import device_in, folder_in
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig, load_ppo_agent
from ludus.trainer.compat.gymformer.trainer.classic_agent import ppo_config_of, train_classic
from ludus.trainer.compat.gymformer.trainer.request import (
    AgentRequest,
    Callback,
    EpisodeReturns,
    TrainsAsAgent,
)

__all__ = ["load_ppo_agent", "train_agent"]


def train_agent(
    env_name: str,
    actor: nn.Module,
    critic: nn.Module,
    ppo_config: PPOConfig,
    max_episodes: int = 1000,
    max_timesteps: int = 1000,
    update_interval: int = 100,
    save_interval: int = 100,
    save_path: str | Path = "./models",
    callback: Callback | None = None,
    log_interval: int = 10,
    device: str | None = None,
    num_envs: int = 8,
    seed: int = 0,
    *,
    name: str | None = None,
    resume: bool = False,
    metrics: Mapping[str, Any] | None = None,
) -> EpisodeReturns:
    """The return of each episode, in the order in which they ended; `.running` is their average.

    Args:
        env_name: a Gymnasium id, `module:id`, or the address of an environment server.
        actor: logits or means of actions, from observations; or a language model.
        max_timesteps: longest episode.
        update_interval: episodes between two updates.
        save_interval: episodes between two agents that are saved, and between two checkpoints.
        save_path: gets the run's folder, and the agents.
        callback: called every `log_interval` episodes with (state, action, reward, done,
            truncated, episode, running_reward).
        device: None is the CPU.
        num_envs: episodes that are played side by side.
        name: of the run; None is that of the environment.
        resume: goes on from the newest checkpoint of a run of that name, where there is one; else
            that run is replaced.
        metrics: as section `metrics` of a run's file: its sinks.

    Raises:
        ConfigError: the modules do not fit the environment, or an argument cannot be.
    """
    request = AgentRequest(
        *(env_name, actor, critic, ppo_config),
        *(max_episodes, max_timesteps, update_interval, save_interval),
        folder_in("save_path", save_path),
        callback,
        log_interval,
        device_in("device", device),
        *(num_envs, seed),
        name=name,
        resume=resume,
        metrics={} if metrics is None else metrics,
    )
    ppo_config_of(ppo_config, num_envs)  # language models have the same bounds
    if isinstance(actor, TrainsAsAgent):
        return actor.train_as_agent(request)
    return train_classic(request)

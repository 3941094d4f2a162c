"""`train_agent`, Gymformer's training function for networks and language models.

train_agent(...) --AgentRequest--+-- actor.train_as_agent(request)   a language model
                                 +-- train_classic(request)          any other torch module
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ludus.trainer.compat.checks import require_device, require_folder
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig, load_ppo_agent
from ludus.trainer.compat.gymformer.trainer.classic_agent import (
    make_network_ppo_config,
    train_classic,
)
from ludus.trainer.compat.gymformer.trainer.request import AgentRequest, Callback, EpisodeReturns

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
    """Train an agent and return the returns of its episodes, in the order in which they ended.

    Args:
        env_name: Gymnasium id, `module:id`, or address of an environment server.
        actor: network that maps observations to logits or means of actions; or a language model.
        max_timesteps: maximum number of steps per episode.
        update_interval: number of episodes between two updates.
        save_interval: number of episodes between two saved agents, and, in whole updates, between
            two checkpoints.
        save_path: parent folder of the run folder and of saved agents.
        callback: function called every `log_interval` episodes with (state, action, reward,
            done, truncated, episode, running_reward).
        device: name of a torch device. None uses the CPU, but a GPU, if any, for a language model.
        num_envs: number of episodes that a network plays in parallel.
        name: name of the run; None uses the name of the environment.
        resume: True resumes from the latest checkpoint of the run with that name, if there is
            one. False replaces that run.
        metrics: section `metrics` of a run's configuration.

    Raises:
        ConfigError: an argument is invalid, or the modules are not compatible with the
            environment.
    """
    request = AgentRequest(
        *(env_name, actor, critic, ppo_config),
        *(max_episodes, max_timesteps, update_interval, save_interval),
        require_folder("save_path", save_path),
        callback,
        log_interval,
        require_device(device),
        *(num_envs, seed),
        name=name,
        resume=resume,
        metrics={} if metrics is None else metrics,
    )
    make_network_ppo_config(ppo_config, num_envs)  # checks the limits, also for language models
    train: Callable[[AgentRequest], EpisodeReturns] = getattr(
        actor, "train_as_agent", train_classic
    )
    return train(request)

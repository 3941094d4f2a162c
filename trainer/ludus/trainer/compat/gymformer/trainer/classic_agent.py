"""`train_agent` for small torch modules: classic PPO, counted in episodes as in Gymformer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from pydantic import ValidationError
from torch import nn

from ludus.proto.config import NetworkPpoConfig, NetworkRun, run_config_from
from ludus.proto.config.network import GYMNASIUM_PREFIX
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Resume
from ludus.trainer.classic.episodes import PlayedStep
from ludus.trainer.classic.run import EpisodeBudget, OpenNetworkRun, open_network_run
from ludus.trainer.compat.checks import rename_setting_in_errors
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig, agent_state
from ludus.trainer.compat.gymformer.trainer.request import (
    RUNNING_WEIGHT,
    AgentRequest,
    EpisodeReturns,
)

Networks = tuple[nn.Module, nn.Module]
"""Actor and critic."""

_NETWORKS: ContextVar[Networks | None] = ContextVar("networks of train_agent", default=None)
_log = logging.getLogger(__name__)
_ALL_AT_ONCE = -1
_WHOLE_BATCH = 2**31
_PPO_NAMES = {
    "update_epochs": "num_epochs",
    "minibatch_size": "minibatch_size",
    "lr_actor": "learning_rate",
    "lr_critic": "critic_learning_rate",
    "gamma": "gamma",
    "gae_lambda": "lam",
    "eps_clip": "clip",
    "value_coef": "value_coef",
    "entropy_coef": "entropy_coef",
    "max_grad_norm": "max_grad_norm",
}
"""Fields of PPOConfig and their names in NetworkPpoConfig."""
_NUM_EVAL_EPISODES = 10
"""Episodes of the final evaluation."""


class _EpisodeRecorder:
    """Records the returns of finished episodes, calls the callback and saves agents."""

    def __init__(self, request: AgentRequest, network_run: OpenNetworkRun) -> None:
        self.returns = EpisodeReturns(network_run.state.returns)
        self._running = (self.returns.running or [0.0])[-1]
        self._request = request
        self._policy = network_run.policy

    def __call__(self, _: np.ndarray, actions: np.ndarray, played: PlayedStep) -> None:
        for episode in played.episodes:
            if len(self.returns) >= self._request.max_episodes:
                return
            self.returns.append(episode.episode_return)
            self._running += RUNNING_WEIGHT * (episode.episode_return - self._running)
            number = len(self.returns)
            if number % self._request.log_interval == 0:
                self._report(played, actions, episode.environment_index, number)
            if number % self._request.save_interval == 0:
                self._save(number)

    def _report(
        self, played: PlayedStep, actions: np.ndarray, environment_index: int, number: int
    ) -> None:
        _log.info("episode %d, running reward %.2f", number, self._running)
        if self._request.callback is None:
            return
        action, step = actions[environment_index], played.vector_step
        self._request.callback(
            step.observations[environment_index],
            action.item() if np.ndim(action) == 0 else action,
            float(step.rewards[environment_index]),
            bool(step.terminated[environment_index]),
            bool(step.truncated[environment_index]),
            number,
            self._running,
        )

    def _save(self, number: int) -> None:
        name = self._request.env_name.replace("/", "_").replace(":", "_")
        folder = self._request.save_path
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(agent_state(self._policy), folder / f"ppo_{name}_episode_{number}.pth")


def train_classic(request: AgentRequest) -> EpisodeReturns:
    """Train and return the returns of the requested episodes."""
    run = make_run(request)
    budget = EpisodeBudget(min(request.update_interval, request.max_episodes), request.max_episodes)
    resume = Resume.AUTO if request.resume else Resume.NEVER
    with (
        rename_setting_in_errors({"environment.address": "env_name"}),
        _use_networks(request.actor, request.critic),
        open_network_run(run, resume=resume, overwrite=True, budget=budget) as network_run,
    ):
        recorder = _EpisodeRecorder(request, network_run)
        network_run.agent.on_step = recorder
        network_run.train()
    return recorder.returns


def make_run(request: AgentRequest) -> NetworkRun:
    """Return the run for a request."""
    episodes_per_update = min(request.update_interval, request.max_episodes)
    name = request.env_name
    is_remote = "://" in name
    local = {"package": GYMNASIUM_PREFIX + name}
    environment = {"kind": "remote", "address": name} if is_remote else local
    num_envs = min(request.num_envs, request.max_episodes)
    run = run_config_from(
        {
            "kind": "network",
            "name": request.run_name,
            "output_dir": str(request.save_path),
            "seed": request.seed,
            "environment": {**environment, "max_turns": request.max_timesteps},
            "model": {
                "make": f"{make_program_networks.__module__}:{make_program_networks.__name__}",
                "device": request.device or "cpu",
            },
            "ppo": make_network_ppo_config(request.ppo_config, num_envs).model_dump(),
            "training": {
                "num_steps": math.ceil(request.max_episodes / episodes_per_update),
                "checkpoint_every_steps": max(1, request.save_interval // episodes_per_update),
            },
            "eval": {"num_games": _NUM_EVAL_EPISODES, "num_games_during": 0},
            "metrics": dict(request.metrics),
        }
    )
    assert isinstance(run, NetworkRun)
    return run


def make_network_ppo_config(config: PPOConfig, num_envs: int) -> NetworkPpoConfig:
    """Return the settings as a NetworkPpoConfig."""
    settings = {ludus_name: getattr(config, name) for name, ludus_name in _PPO_NAMES.items()}
    if config.minibatch_size == _ALL_AT_ONCE:
        settings["minibatch_size"] = _WHOLE_BATCH
    try:
        return NetworkPpoConfig(num_environments=num_envs, schedule="constant", **settings)
    except ValidationError as error:
        fault = error.errors()[0]
        name = next(name for name, key in _PPO_NAMES.items() if key == fault["loc"][0])
        message = fault["msg"][:1].lower() + fault["msg"][1:]
        raise ConfigError(f"PPOConfig.{name} = {fault['input']!r:.60}: {message}") from None


@contextmanager
def _use_networks(actor: nn.Module, critic: nn.Module) -> Iterator[None]:
    """Make the runs that open in this block train these networks."""
    token = _NETWORKS.set((actor, critic))
    try:
        yield
    finally:
        _NETWORKS.reset(token)


def make_program_networks(observations: spaces.Space[Any], actions: spaces.Space[Any]) -> Networks:
    """Return the networks of the current call of `train_agent`."""
    networks = _NETWORKS.get()
    if networks is None:
        raise ConfigError(
            "this run trains networks that a program passed to train_agent; continue with that "
            "program and train_agent(..., resume=True), or load a saved agent with load_ppo_agent"
        )
    return networks

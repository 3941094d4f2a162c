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

from ludus.proto.config import NetworkPpoConfig, NetworkRun, make_run_config
from ludus.proto.config.network import GYMNASIUM_PREFIX
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Resume
from ludus.trainer.classic.environments import VectorStep
from ludus.trainer.classic.episodes import PlayedStep
from ludus.trainer.classic.run import EpisodeBudget, OpenNetworkRun, open_network_run
from ludus.trainer.compat.checks import rename_in_errors
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig, make_agent_state
from ludus.trainer.compat.gymformer.trainer.request import (
    AgentRequest,
    EpisodeReturns,
    update_running_average,
)
from ludus.trainer.core.option_names import use_option_names

Networks = tuple[nn.Module, nn.Module]
"""Actor and critic."""

_CURRENT_NETWORKS: ContextVar[Networks | None] = ContextVar("networks of train_agent", default=None)
_log = logging.getLogger(__name__)
_ALL_STEPS = -1
_WHOLE_BATCH_SIZE = 2**31
_SETTING_BY_FIELD = {
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
"""Number of episodes of the final evaluation."""


class _EpisodeRecorder:
    """A callback that records the returns of finished episodes, reports them and saves agents."""

    def __init__(self, request: AgentRequest, network_run: OpenNetworkRun) -> None:
        self.returns = EpisodeReturns(network_run.state.returns)
        self._average = (self.returns.running or [0.0])[-1]
        self._request = request
        self._policy = network_run.policy

    def __call__(self, _: np.ndarray, actions: np.ndarray, played_step: PlayedStep) -> None:
        for episode in played_step.episodes:
            if len(self.returns) >= self._request.max_episodes:
                return
            self.returns.append(episode.episode_return)
            self._average = update_running_average(self._average, episode.episode_return)
            if len(self.returns) % self._request.log_interval == 0:
                self._report(played_step.vector_step, actions, episode.environment_index)
            if len(self.returns) % self._request.save_interval == 0:
                self._save()

    def _report(self, step: VectorStep, actions: np.ndarray, index: int) -> None:
        """Log the episode that ended in environment `index`, and call the callback."""
        _log.info("episode %d, running reward %.2f", len(self.returns), self._average)
        if self._request.callback is None:
            return
        action = actions[index]
        self._request.callback(
            step.observations[index],
            action.item() if np.ndim(action) == 0 else action,
            float(step.rewards[index]),
            bool(step.terminated[index]),
            bool(step.truncated[index]),
            len(self.returns),
            self._average,
        )

    def _save(self) -> None:
        name = self._request.env_name.replace("/", "_").replace(":", "_")
        folder = self._request.save_path
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"ppo_{name}_episode_{len(self.returns)}.pth"
        torch.save(make_agent_state(self._policy), path)


def train_classic(request: AgentRequest) -> EpisodeReturns:
    """Train and return the returns of the requested episodes."""
    run = make_run(request)
    budget = EpisodeBudget(min(request.update_interval, request.max_episodes), request.max_episodes)
    resume = Resume.AUTO if request.resume else Resume.NEVER
    with (
        rename_in_errors({"environment.address": "env_name"}),
        _use_networks(request.actor, request.critic),
        use_option_names(resume="resume=True", overwrite="resume=False"),
        open_network_run(run, resume=resume, overwrite=True, budget=budget) as network_run,
    ):
        recorder = _EpisodeRecorder(request, network_run)
        network_run.agent.on_step = recorder
        network_run.train()
    return recorder.returns


def make_run(request: AgentRequest) -> NetworkRun:
    """Return the run for a request."""
    episodes_per_update = min(request.update_interval, request.max_episodes)
    environment = {"package": GYMNASIUM_PREFIX + request.env_name}
    if "://" in request.env_name:
        environment = {"kind": "remote", "address": request.env_name}
    num_envs = min(request.num_envs, request.max_episodes)
    run = make_run_config(
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
                "checkpoint_every_s": None,
            },
            "eval": {"num_games": _NUM_EVAL_EPISODES, "num_games_during": 0},
            "metrics": dict(request.metrics),
        }
    )
    assert isinstance(run, NetworkRun)
    return run


def make_network_ppo_config(config: PPOConfig, num_envs: int) -> NetworkPpoConfig:
    """Return the settings as a NetworkPpoConfig."""
    settings = {setting: getattr(config, field) for field, setting in _SETTING_BY_FIELD.items()}
    if config.minibatch_size == _ALL_STEPS:
        settings["minibatch_size"] = _WHOLE_BATCH_SIZE
    try:
        return NetworkPpoConfig(num_environments=num_envs, schedule="constant", **settings)
    except ValidationError as error:
        mistake = error.errors()[0]
        field_by_setting = {setting: field for field, setting in _SETTING_BY_FIELD.items()}
        field = field_by_setting[str(mistake["loc"][0])]
        message = mistake["msg"][:1].lower() + mistake["msg"][1:]
        raise ConfigError(f"PPOConfig.{field} = {mistake['input']!r:.60}: {message}") from None


@contextmanager
def _use_networks(actor: nn.Module, critic: nn.Module) -> Iterator[None]:
    """Let the runs that are opened in this block train these networks."""
    token = _CURRENT_NETWORKS.set((actor, critic))
    try:
        yield
    finally:
        _CURRENT_NETWORKS.reset(token)


def make_program_networks(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> Networks:
    """Return the networks of the current call of `train_agent`."""
    networks = _CURRENT_NETWORKS.get()
    if networks is None:
        raise ConfigError(
            "this run trains networks that a program passed to train_agent; continue with that "
            "program and train_agent(..., resume=True), or load a saved agent with load_ppo_agent"
        )
    return networks

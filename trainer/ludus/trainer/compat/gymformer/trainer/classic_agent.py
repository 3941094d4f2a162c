"""`train_agent` for torch modules that act on numbers: classic PPO, with Gymformer's counting."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from ludus.proto.config import NetworkPpoConfig, NetworkRun, run_config_from
from ludus.proto.config.network import GYMNASIUM_PREFIX
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Resume
from ludus.trainer.classic.episodes import PlayedStep
from ludus.trainer.classic.run import EpisodeBudget, OpenNetworkRun, open_network_run
from ludus.trainer.compat.gymformer.arguments import told_as
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig, saved_agent
from ludus.trainer.compat.gymformer.trainer.given import given_networks, make_given
from ludus.trainer.compat.gymformer.trainer.request import AgentRequest, EpisodeReturns

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
"""The fields of PPOConfig, and what classic PPO calls them."""
_NUM_JUDGED = 10
"""Games of the evaluation that ends a run."""


class _Following:
    """Counts episodes as they end: returns, calls of the user's function, saved agents."""

    def __init__(self, request: AgentRequest, network_run: OpenNetworkRun) -> None:
        self.returns = EpisodeReturns(network_run.state.returns)
        self._running = (self.returns.running or [0.0])[-1]
        self._request = request
        self._policy = network_run.policy

    def __call__(self, seen: np.ndarray, actions: np.ndarray, played: PlayedStep) -> None:
        for episode in played.episodes:
            if len(self.returns) >= self._request.max_episodes:
                return
            self.returns.append(episode.episode_return)
            self._running += 0.05 * (episode.episode_return - self._running)
            number = len(self.returns)
            if number % self._request.log_interval == 0:
                self._tell(
                    played, actions[episode.environment_index], episode.environment_index, number
                )
            if number % self._request.save_interval == 0:
                self._save(number)

    def _tell(self, played: PlayedStep, action: Any, place: int, number: int) -> None:
        _log.info("episode %d, running reward %.2f", number, self._running)
        if self._request.callback is None:
            return
        stepped = played.vector_step
        self._request.callback(
            stepped.observations[place],
            action.item() if np.ndim(action) == 0 else action,
            float(stepped.rewards[place]),
            bool(stepped.terminated[place]),
            bool(stepped.truncated[place]),
            number,
            self._running,
        )

    def _save(self, number: int) -> None:
        name = self._request.env_name.replace("/", "_").replace(":", "_")
        folder = self._request.save_path
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(saved_agent(self._policy), folder / f"ppo_{name}_episode_{number}.pth")


def train_classic(request: AgentRequest) -> EpisodeReturns:
    """The returns of the episodes that `request` asked for; a run's folder has the rest.

    Raises:
        UserError: the environment cannot be had, or the modules do not fit it.
    """
    run = make_run(request)
    budget = EpisodeBudget(min(request.update_interval, request.max_episodes), request.max_episodes)
    resume = Resume.AUTO if request.resume else Resume.NEVER
    with (
        told_as({"environment.address": "env_name"}),
        given_networks(request.actor, request.critic),
        open_network_run(run, resume=resume, overwrite=True, budget=budget) as network_run,
    ):
        following = _Following(request, network_run)
        network_run.on_step = following
        network_run.train()
    return following.returns


def make_run(request: AgentRequest) -> NetworkRun:
    """The run that `request` asks for."""
    per_update = min(request.update_interval, request.max_episodes)
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
                "make": f"{make_given.__module__}:{make_given.__name__}",
                "device": request.device or "cpu",
            },
            "ppo": ppo_config_of(request.ppo_config, num_envs).model_dump(),
            "training": {
                "num_steps": math.ceil(request.max_episodes / per_update),
                "checkpoint_every_steps": max(1, request.save_interval // per_update),
            },
            "eval": {"num_games": _NUM_JUDGED, "num_games_during": 0},
            "metrics": dict(request.metrics),
        }
    )
    assert isinstance(run, NetworkRun)
    return run


def ppo_config_of(config: PPOConfig, num_envs: int) -> NetworkPpoConfig:
    """The same settings, as classic PPO calls them.

    Raises:
        ConfigError: a field has a value that cannot be.
    """
    settings = {own: getattr(config, name) for name, own in _PPO_NAMES.items()}
    if config.minibatch_size == _ALL_AT_ONCE:
        settings["minibatch_size"] = _WHOLE_BATCH
    try:
        return NetworkPpoConfig(num_environments=num_envs, schedule="constant", **settings)
    except ValidationError as error:
        fault = error.errors()[0]
        name = next(name for name, own in _PPO_NAMES.items() if own == fault["loc"][0])
        said = fault["msg"][:1].lower() + fault["msg"][1:]
        raise ConfigError(f"PPOConfig.{name} = {fault['input']!r:.60}: {said}") from None

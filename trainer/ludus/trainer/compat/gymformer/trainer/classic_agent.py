"""`train_agent` for torch modules that act on numbers: classic PPO, with Gymformer's counting."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from ludus.proto.config import LocalEnvironment, NetworkPpoConfig, RemoteEnvironment
from ludus.proto.config.network import GYMNASIUM
from ludus.trainer.classic.agent import Agent
from ludus.trainer.classic.environments import VectorEnvironment, make_environments
from ludus.trainer.classic.playing import Played
from ludus.trainer.classic.policy import Policy
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig, saved_agent
from ludus.trainer.compat.gymformer.trainer.request import AgentRequest, EpisodeReturns

_log = logging.getLogger(__name__)
_ALL_AT_ONCE = -1
_WHOLE_BATCH = 2**31


class _Following:
    """Counts episodes as they end: returns, calls of the user's function, saved agents."""

    def __init__(self, request: AgentRequest, policy: Policy) -> None:
        self.returns = EpisodeReturns()
        self._running = 0.0
        self._request = request
        self._policy = policy

    def __call__(self, seen: np.ndarray, actions: np.ndarray, played: Played) -> None:
        for episode in played.episodes:
            if len(self.returns) >= self._request.max_episodes:
                return
            self.returns.append(episode.episode_return)
            self._running += 0.05 * (episode.episode_return - self._running)
            number = len(self.returns)
            if number % self._request.log_interval == 0:
                self._tell(played, actions[episode.place], episode.place, number)
            if number % self._request.save_interval == 0:
                self._save(number)

    def _tell(self, played: Played, action: Any, place: int, number: int) -> None:
        _log.info("episode %d, running reward %.2f", number, self._running)
        if self._request.callback is None:
            return
        stepped = played.stepped
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
    """The returns of the episodes that `request` asked for.

    Raises:
        UserError: the environment cannot be had, or the modules do not fit it.
    """
    environments = _environments(request)
    try:
        policy = Policy(
            request.actor,
            request.critic,
            environments.observation_space,
            environments.action_space,
            device=request.device or "cpu",
        )
        following = _Following(request, policy)
        agent = Agent(
            policy,
            environments,
            ppo_config_of(request.ppo_config, request.num_envs),
            seed=request.seed,
            max_steps=request.max_timesteps,
            num_episodes=min(request.update_interval, request.max_episodes),
            on_step=following,
        )
        while len(following.returns) < request.max_episodes:
            agent.train()
        return following.returns
    finally:
        environments.close()


def ppo_config_of(config: PPOConfig, num_envs: int) -> NetworkPpoConfig:
    """The same settings, as classic PPO calls them."""
    size = config.minibatch_size
    return NetworkPpoConfig(
        num_environments=num_envs,
        num_epochs=config.update_epochs,
        minibatch_size=_WHOLE_BATCH if size == _ALL_AT_ONCE else size,
        learning_rate=config.lr_actor,
        critic_learning_rate=config.lr_critic,
        schedule="constant",
        gamma=config.gamma,
        lam=config.gae_lambda,
        clip=config.eps_clip,
        value_coef=config.value_coef,
        entropy_coef=config.entropy_coef,
        max_grad_norm=config.max_grad_norm,
    )


def _environments(request: AgentRequest) -> VectorEnvironment:
    name, num = request.env_name, min(request.num_envs, request.max_episodes)
    if "://" in name:
        return make_environments(RemoteEnvironment(address=name), num)
    return make_environments(LocalEnvironment(package=GYMNASIUM + name), num)

"""An agent: a policy with its environments, trained update by update, without files.

ParallelEpisodes --observations--> policy --actions--> ParallelEpisodes ... --> NetworkBatch
                          T steps of N environments
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.config import NetworkPpoConfig
from ludus.trainer.classic.environments import VectorEnvironment
from ludus.trainer.classic.episodes import NetworkBatch, ParallelEpisodes, PlayedStep
from ludus.trainer.classic.policy import NetworkPolicy
from ludus.trainer.classic.update import PpoUpdate
from ludus.trainer.core.streams import Stream, derive_training_seed, use_torch_stream

StepCallback = Callable[[np.ndarray, np.ndarray, PlayedStep], None]
"""Function of the observations before a step, the actions in the action space, and the step."""
ActionFunction = Callable[[np.ndarray, int], np.ndarray]
"""Function (observations [N, ...], step index) -> actions [N, ...] in the action space."""
_NOISE_STEPS = 128
"""Number of steps whose noise is sampled at once."""
_MAX_EVAL_ENVIRONMENTS = 32


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A batch after its update."""

    batch: NetworkBatch
    metrics: Mapping[str, float]
    """Metrics of the update, by TrainMetric."""


class PpoAgent:
    """Trains a policy by PPO.

    Args:
        seed: seed of the episodes, the actions and the order of the minibatches.
        max_steps: maximum number of steps of an episode. None leaves the limit to the environment.
        num_episodes: number of episodes per update, instead of config.steps_per_environment.
        shuffles_rewards: whether to shuffle the rewards of each batch, as a negative control.
    """

    def __init__(
        self,
        policy: NetworkPolicy,
        environments: VectorEnvironment,
        config: NetworkPpoConfig,
        *,
        seed: int = 0,
        max_steps: int | None = None,
        num_episodes: int | None = None,
        shuffles_rewards: bool = False,
    ) -> None:
        self.policy = policy
        self.num_updates = 0
        self.on_step: StepCallback | None = None
        """Called after each step of the environments."""
        self._seed = seed
        self._num_steps = config.steps_per_environment
        self._num_episodes = num_episodes
        self._shuffles_rewards = shuffles_rewards
        self._update = PpoUpdate(policy, config, seed)
        choose_seed = partial(derive_training_seed, seed)
        self._episodes = ParallelEpisodes(environments, choose_seed, max_steps=max_steps)

    def train(self, learning_rate_factor: float = 1.0) -> TrainedBatch:
        """Play a batch, update the policy with it, and return both."""
        if not self._episodes.has_unfinished:
            self._episodes.start()
        batch = self._collect()
        training_batch = self._shuffle_rewards(batch) if self._shuffles_rewards else batch
        metrics = self._update.train(training_batch, self.num_updates, learning_rate_factor)
        self.num_updates += 1
        return TrainedBatch(batch, metrics)

    def get_state(self) -> dict[str, Any]:
        """Return the complete state, in tensors and plain values."""
        scaler = self._update.reward_scaler
        return {
            "num_updates": self.num_updates,
            "policy": self.policy.state_dict(),
            "optimizer": self._update.optimizer.state_dict(),
            "episodes": self._episodes.get_state(),
            "reward_scale": None if scaler is None else scaler.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the result of `get_state`, and replay the unfinished episodes."""
        self.num_updates = state["num_updates"]
        self.policy.load_state_dict(state["policy"])
        self._update.optimizer.load_state_dict(state["optimizer"])
        if self._update.reward_scaler is not None:
            self._update.reward_scaler.restore(state["reward_scale"])
        self._episodes.restore(state["episodes"])

    def _collect(self) -> NetworkBatch:
        policy, episodes = self.policy, self._episodes
        observations, actions = [episodes.observations], list[Tensor]()
        steps: list[PlayedStep] = []
        while not self._is_complete(steps):
            if len(steps) % _NOISE_STEPS == 0:
                noise = self._sample_noise(len(steps) // _NOISE_STEPS)
            sampled_actions = policy.act(observations[-1], noise[len(steps) % _NOISE_STEPS])
            environment_actions = policy.head.to_environment_actions(sampled_actions.cpu().numpy())
            step = episodes.step(environment_actions)
            if self.on_step is not None:
                self.on_step(observations[-1], environment_actions, step)
            actions.append(sampled_actions)
            observations.append(episodes.observations)
            steps.append(step)
        return _make_batch(policy, observations, actions, steps)

    def _sample_noise(self, block_index: int) -> Tensor:
        with use_torch_stream(self._seed, Stream.NETWORK_SAMPLING, self.num_updates, block_index):
            max_steps = self._num_steps if self._num_episodes is None else _NOISE_STEPS
            num_steps = min(_NOISE_STEPS, max_steps)
            noise = self.policy.head.sample_noise(num_steps, len(self._episodes.observations))
        return noise.to(self.policy.device)

    def _is_complete(self, steps: list[PlayedStep]) -> bool:
        if self._num_episodes is None:
            return len(steps) >= self._num_steps
        return sum(len(step.episodes) for step in steps) >= self._num_episodes

    def _shuffle_rewards(self, batch: NetworkBatch) -> NetworkBatch:
        with use_torch_stream(self._seed, Stream.REWARD_SHUFFLE, self.num_updates):
            permutation = torch.randperm(batch.num_steps).to(batch.rewards.device)
        rewards = batch.rewards.flatten()[permutation].view_as(batch.rewards)
        return replace(batch, rewards=rewards)


def evaluate_policy(
    policy: NetworkPolicy,
    environments: VectorEnvironment,
    seeds: Sequence[int],
    *,
    is_greedy: bool,
    run_seed: int = 0,
    max_steps: int | None = None,
) -> list[EpisodeOutcome]:
    """Play one episode per seed with the policy, and return the outcomes in the same order."""
    head = policy.head

    def choose_actions(observations: np.ndarray, step: int) -> np.ndarray:
        noise = None
        if not is_greedy:
            with use_torch_stream(run_seed, Stream.NETWORK_EVALUATION, step):
                noise = head.sample_noise(1, environments.num_environments)[0].to(policy.device)
        return head.to_environment_actions(policy.act(observations, noise).cpu().numpy())

    return play_episodes(environments, seeds, choose_actions, max_steps)


def play_episodes(
    environments: VectorEnvironment,
    seeds: Sequence[int],
    choose_actions: ActionFunction,
    max_steps: int | None = None,
) -> list[EpisodeOutcome]:
    """Play one episode per seed, and return the outcomes in the same order."""
    num_environments = environments.num_environments

    def choose_seed(index: int, number: int) -> int | None:
        position = number * num_environments + index
        return seeds[position] if position < len(seeds) else None

    episodes = ParallelEpisodes(environments, choose_seed, max_steps=max_steps)
    episodes.start()
    outcomes: dict[int, EpisodeOutcome] = {}
    step = 0
    while episodes.has_unfinished:
        played_step = episodes.step(choose_actions(episodes.observations, step))
        outcomes |= {episode.seed: episode.outcome for episode in played_step.episodes}
        step += 1
    return [outcomes[seed] for seed in seeds]


def choose_num_eval_environments(num_episodes: int) -> int:
    """Choose the number of parallel environments for an evaluation.

    All environments play nearly the same number of episodes. Otherwise, most environments would
    be idle in the last round.
    """
    return math.ceil(num_episodes / math.ceil(num_episodes / _MAX_EVAL_ENVIRONMENTS))


def _make_batch(
    policy: NetworkPolicy,
    observations: list[np.ndarray],
    actions: list[Tensor],
    steps: list[PlayedStep],
) -> NetworkBatch:
    device = policy.device
    vector_steps = [step.vector_step for step in steps]
    terminated = np.stack([step.terminated for step in vector_steps])
    is_finished = np.stack([step.is_finished for step in steps])
    truncations = np.argwhere(is_finished & ~terminated)
    # After the end of an episode, `observations` has the first observation of the next one.
    last_observations = [vector_steps[step].observations[index] for step, index in truncations]
    rewards = np.stack([step.rewards for step in vector_steps]).astype(np.float32)
    return NetworkBatch(
        observations=policy.to_tensor(np.stack(observations)),
        actions=torch.stack(actions),
        rewards=torch.from_numpy(rewards).to(device),
        terminated=torch.from_numpy(terminated).to(device),
        is_finished=torch.from_numpy(is_finished).to(device),
        truncations=torch.from_numpy(truncations).to(device),
        truncated_observations=policy.to_tensor(
            np.stack(last_observations) if last_observations else observations[0][:0]
        ),
        episodes=tuple(episode for step in steps for episode in step.episodes),
        finish_steps=tuple(number for number, step in enumerate(steps) for _ in step.episodes),
    )

"""Collection of the batch for an update.

ParallelEpisodes --observations--> policy --actions--> ParallelEpisodes ...   --> NetworkBatch
                          T steps of N environments
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ludus.trainer.classic.episodes import FinishedEpisode, ParallelEpisodes, PlayedStep
from ludus.trainer.classic.policy import NetworkPolicy
from ludus.trainer.core.streams import Stream, use_torch_stream

OnStep = Callable[[np.ndarray, np.ndarray, PlayedStep], None]
"""Function of the observations before a step, the actions in the action space, and the step."""
_NOISE_STEPS = 128
"""Number of steps whose noise is sampled at once."""


@dataclass(frozen=True, slots=True)
class NetworkBatch:
    """T steps of N environments, played between two updates."""

    observations: Tensor
    """[T + 1, N, ...], not normalized. The last observations follow the last actions."""
    actions: Tensor
    """[T, N, ...], as sampled by the policy."""
    rewards: Tensor
    """[T, N]."""
    terminated: Tensor
    """[T, N] bool."""
    finished: Tensor
    """[T, N] bool: terminated or truncated."""
    truncations: Tensor
    """[K, 2]: step and environment of each truncation."""
    truncated_observations: Tensor
    """[K, ...]: last observation of each truncated episode."""
    episodes: tuple[FinishedEpisode, ...]
    """Episodes that finished in this batch."""
    finish_steps: tuple[int, ...]
    """Last step of each of these episodes."""

    @property
    def num_steps(self) -> int:
        """Number of environment steps, T * N."""
        return self.rewards.numel()


class Collector:
    """Plays the batches of successive updates.

    Args:
        seed: seed of the run.
        num_steps: T. None plays until `num_episodes` episodes have finished.
    """

    def __init__(
        self,
        episodes: ParallelEpisodes,
        policy: NetworkPolicy,
        seed: int,
        *,
        num_steps: int | None,
        num_episodes: int = 0,
        on_step: OnStep | None = None,
    ) -> None:
        self._episodes = episodes
        self._policy = policy
        self._seed = seed
        self._num_steps = num_steps
        self._num_episodes = num_episodes
        self._on_step = on_step

    def collect(self, update: int) -> NetworkBatch:
        """Play and return the batch of an update, counted from 0."""
        policy, episodes = self._policy, self._episodes
        observations, actions = [episodes.observations], list[Tensor]()
        steps: list[PlayedStep] = []
        while not self._is_complete(steps):
            if len(steps) % _NOISE_STEPS == 0:
                noise = self._sample_noise(update, len(steps) // _NOISE_STEPS)
            sampled_actions = policy.act(observations[-1], noise[len(steps) % _NOISE_STEPS])
            environment_actions = policy.head.to_environment(sampled_actions.cpu().numpy())
            step = episodes.step(environment_actions)
            if self._on_step is not None:
                self._on_step(observations[-1], environment_actions, step)
            actions.append(sampled_actions)
            observations.append(episodes.observations)
            steps.append(step)
        return _make_batch(policy, observations, actions, steps)

    def _sample_noise(self, update: int, block: int) -> Tensor:
        with use_torch_stream(self._seed, Stream.NETWORK_SAMPLING, update, block):
            num_steps = min(_NOISE_STEPS, self._num_steps or _NOISE_STEPS)
            noise = self._policy.head.sample_noise(num_steps, len(self._episodes.observations))
        return noise.to(self._policy.device)

    def _is_complete(self, steps: list[PlayedStep]) -> bool:
        if self._num_steps is not None:
            return len(steps) >= self._num_steps
        return sum(len(step.episodes) for step in steps) >= self._num_episodes


def _make_batch(
    policy: NetworkPolicy,
    observations: list[np.ndarray],
    actions: list[Tensor],
    steps: list[PlayedStep],
) -> NetworkBatch:
    device = policy.device
    terminated = np.stack([step.vector_step.terminated for step in steps])
    is_finished = np.stack([step.finished for step in steps])
    truncations = np.argwhere(is_finished & ~terminated)
    # After the end of an episode, `observations` has the first observation of the next one.
    last_observations = [
        steps[step].vector_step.observations[environment] for step, environment in truncations
    ]
    rewards = np.stack([step.vector_step.rewards for step in steps]).astype(np.float32)
    return NetworkBatch(
        observations=policy.to_tensor(np.stack(observations)),
        actions=torch.stack(actions),
        rewards=torch.from_numpy(rewards).to(device),
        terminated=torch.from_numpy(terminated).to(device),
        finished=torch.from_numpy(is_finished).to(device),
        truncations=torch.from_numpy(truncations).to(device),
        truncated_observations=policy.to_tensor(
            np.stack(last_observations) if last_observations else observations[0][:0]
        ),
        episodes=tuple(episode for step in steps for episode in step.episodes),
        finish_steps=tuple(number for number, step in enumerate(steps) for _ in step.episodes),
    )

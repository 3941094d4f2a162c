"""Parallel episodes: their seeds, returns and lengths.

    seeds --> VectorEnvironment --step--> returns, lengths --> FinishedEpisode

The seed and the actions determine an episode. Both are kept while the episode is played, so that a
resumed run can replay it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.errors import ExecutionError
from ludus.proto.rewards import MAX_REWARD, REWARD_RULE
from ludus.trainer.classic.environments import VectorEnvironment, VectorStep

_log = logging.getLogger(__name__)

SeedFunction = Callable[[int, int], int | None]
"""Function (environment index, episode number) -> seed. None means no further episode."""


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """The result of an episode."""

    environment_index: int
    """Index of the episode's environment among the parallel environments."""
    number: int
    """Number of the episode in this environment, from 0."""
    seed: int
    episode_return: float
    length: int
    terminated: bool
    success: bool | None

    @property
    def outcome(self) -> EpisodeOutcome:
        """The outcome for evaluations."""
        return EpisodeOutcome(self.seed, self.episode_return, self.length, self.success)


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """One step of all N episodes."""

    vector_step: VectorStep
    """Step of the environments. `truncated` includes truncations by the run's own limit."""
    is_finished: np.ndarray
    """[N] bool: terminated or truncated."""
    episodes: tuple[FinishedEpisode, ...]


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
    is_finished: Tensor
    """[T, N] bool: terminated or truncated."""
    truncations: Tensor
    """[K, 2]: step and environment of each truncation."""
    truncated_observations: Tensor
    """[K, ...]: last observation of each truncated episode."""
    episodes: tuple[FinishedEpisode, ...]
    """Episodes that finished in this batch."""
    finish_steps: tuple[int, ...]
    """Index of the last step of each of these episodes in the batch."""

    @property
    def num_steps(self) -> int:
        """Number of environment steps, T * N."""
        return self.rewards.numel()


@dataclass(slots=True)
class _RunningEpisode:
    number: int
    seed: int | None
    """None if the environment has no further episode and only steps together with the others."""
    actions: list[np.ndarray] = field(default_factory=list)
    """Actions so far, in the action space."""
    episode_return: float = 0.0


class ParallelEpisodes:
    """N environments, each with the episode that it plays."""

    def __init__(
        self,
        environments: VectorEnvironment,
        choose_seed: SeedFunction,
        *,
        max_steps: int | None = None,
    ) -> None:
        self._environments = environments
        self._choose_seed = choose_seed
        self._max_steps = max_steps
        self._lengths = np.zeros(environments.num_environments, dtype=np.int64)
        self._returns = np.zeros(environments.num_environments)
        self._episodes: list[_RunningEpisode] = []
        self.observations = np.zeros(0)
        """[N, ...]: observations for the next actions."""

    def start(self) -> None:
        """Start the first episode of each environment."""
        num_environments = self._environments.num_environments
        self._episodes = [_RunningEpisode(-1, None) for _ in range(num_environments)]
        self._start_next(range(num_environments))

    @property
    def has_unfinished(self) -> bool:
        """True if an environment still plays an episode with a seed."""
        return any(episode.seed is not None for episode in self._episodes)

    def step(self, actions: np.ndarray) -> PlayedStep:
        """Step all environments, and replace finished episodes by new ones."""
        step = self._environments.step(actions)
        self._lengths += 1
        returns = self._returns + step.rewards
        is_valid = (np.abs(step.rewards) <= MAX_REWARD) & (np.abs(returns) <= MAX_REWARD)
        if not is_valid.all():
            index = int(np.flatnonzero(~is_valid)[0])
            raise ExecutionError(
                f"the environment returned the reward {step.rewards[index]} in step "
                f"{self._lengths[index]} of an episode; a reward and the sum of an episode's "
                f"rewards must be {REWARD_RULE}"
            )
        self._returns += step.rewards
        for episode, action in zip(self._episodes, actions, strict=True):
            episode.actions.append(action)
        if self._max_steps is not None:
            is_truncated = (self._lengths >= self._max_steps) & ~step.terminated
            step = VectorStep(
                step.observations, step.rewards, step.terminated, step.truncated | is_truncated
            )
        is_finished = step.terminated | step.truncated
        self.observations = step.observations
        if not is_finished.any():
            return PlayedStep(step, is_finished, ())
        indices = np.flatnonzero(is_finished).tolist()
        episodes = tuple(
            self._finish_episode(index, step)
            for index in indices
            if self._episodes[index].seed is not None
        )
        self._start_next(indices)
        return PlayedStep(step, is_finished, episodes)

    def get_state(self) -> list[dict[str, Any]]:
        """Return seed, number, actions and current observation of each unfinished episode."""
        return [
            {
                "number": episode.number,
                "seed": episode.seed,
                "actions": torch.as_tensor(np.array(episode.actions)),
                "observation": torch.as_tensor(np.array(observation)),
            }
            for episode, observation in zip(self._episodes, self.observations, strict=True)
        ]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Replay the episodes in `state` up to their current observations.

        If a replayed episode ends early or has a different observation, all environments start a
        new episode.
        """
        episodes = [
            _RunningEpisode(episode["number"], episode["seed"], list(episode["actions"].numpy()))
            for episode in state
        ]
        self._episodes = episodes
        observations = np.stack([episode["observation"].numpy() for episode in state])
        if not self._replay() or not np.array_equal(observations, self.observations):
            _log.warning(
                "the environment is not deterministic: unfinished episodes are played from the "
                "start"
            )
            self._start_next(range(self._environments.num_environments))

    def _replay(self) -> bool:
        """Repeat the actions of all episodes; return False if a replayed episode has ended.

        All environments step together. Environments with fewer actions start later; until then they
        take any valid action.
        """
        episodes = self._episodes
        num_steps = max(len(episode.actions) for episode in episodes)
        start_steps = [num_steps - len(episode.actions) for episode in episodes]
        filler_action = next((episode.actions[0] for episode in episodes if episode.actions), None)
        for step in range(num_steps + 1):
            self._reset(
                {
                    index: episode.seed or 0
                    for index, episode in enumerate(episodes)
                    if step in (0, start_steps[index])
                }
            )
            if step == num_steps:
                break
            actions = [
                filler_action if step < start_step else episode.actions[step - start_step]
                for start_step, episode in zip(start_steps, episodes, strict=True)
            ]
            vector_step = self._environments.step(np.array(actions))
            if not self._replay_step(vector_step, start_steps, step):
                return False
        return True

    def _replay_step(self, vector_step: VectorStep, start_steps: Sequence[int], step: int) -> bool:
        """Record a replayed step, and reset environments that wait and whose episode has ended.

        Returns False if a replayed episode has ended.
        """
        self._lengths += 1
        self._returns += vector_step.rewards
        self.observations = vector_step.observations
        is_finished = vector_step.terminated | vector_step.truncated
        is_waiting = step < np.array(start_steps)
        if (is_finished & ~is_waiting).any():
            return False
        indices = np.flatnonzero(is_finished & is_waiting).tolist()
        self._reset({index: self._episodes[index].seed or 0 for index in indices})
        return True

    def _reset(self, seeds: Mapping[int, int]) -> None:
        if not seeds:
            return
        self.observations = self._environments.reset(seeds)
        indices = list(seeds)
        self._lengths[indices], self._returns[indices] = 0, 0.0

    def _start_next(self, indices: Iterable[int]) -> None:
        seeds: dict[int, int] = {}
        for index in indices:
            number = self._episodes[index].number + 1
            seed = self._choose_seed(index, number)
            self._episodes[index] = _RunningEpisode(number, seed)
            seeds[index] = seed or 0
        self._reset(seeds)

    def _finish_episode(self, index: int, step: VectorStep) -> FinishedEpisode:
        episode, episode_return = self._episodes[index], float(self._returns[index])
        assert episode.seed is not None
        return FinishedEpisode(
            environment_index=index,
            number=episode.number,
            seed=episode.seed,
            episode_return=episode_return,
            length=int(self._lengths[index]),
            terminated=bool(step.terminated[index]),
            success=self._environments.report_success(index, episode_return),
        )

"""Plays the policy for a number of steps, and keeps what an update learns from.

    Playing --observations--> Policy.act --actions--> Playing ...  T times  --> Batch

Shapes: T = steps, N = environments side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ludus.trainer.classic.playing import EndedEpisode, Played, Playing
from ludus.trainer.classic.policy import Policy
from ludus.trainer.core.streams import Stream, use_torch_stream

OnStep = Callable[[np.ndarray, np.ndarray, Played], None]
"""Called with the observations acted on, the actions as the space has them, and the step."""
_NOISE_STEPS = 128
"""Drawn at once."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What was played between two updates."""

    observations: Tensor
    """[T + 1, N, ...], raw; the last ones are acted on next."""
    actions: Tensor
    """[T, N, ...], as the policy drew them."""
    rewards: Tensor
    """[T, N]."""
    terminated: Tensor
    """[T, N] bool."""
    ended: Tensor
    """[T, N] bool: terminated or cut off."""
    cut_off: Tensor
    """[K, 2]: step and environment where an episode was cut off, and its value goes on."""
    cut_off_observations: Tensor
    """[K, ...]: what was seen there last."""
    episodes: tuple[EndedEpisode, ...]
    """Those that ended."""
    ended_at: tuple[int, ...]
    """The steps at which they did."""

    @property
    def num_steps(self) -> int:
        """T * N."""
        return self.rewards.numel()


class Collector:
    """Plays on where it stopped.

    Args:
        seed: of the run.
        num_steps: T; None plays until `num_episodes` have ended.
    """

    def __init__(
        self,
        playing: Playing,
        policy: Policy,
        seed: int,
        *,
        num_steps: int | None,
        num_episodes: int = 0,
        on_step: OnStep | None = None,
    ) -> None:
        self._playing = playing
        self._policy = policy
        self._seed = seed
        self._num_steps = num_steps
        self._num_episodes = num_episodes
        self._on_step = on_step

    def collect(self, update: int) -> Batch:
        """What was played for the `update`-th update, from 0."""
        policy, playing = self._policy, self._playing
        seen, drawn = [playing.observations], list[Tensor]()
        steps: list[Played] = []
        while not self._is_enough(steps):
            if len(steps) % _NOISE_STEPS == 0:
                noise = self._noise(update, len(steps) // _NOISE_STEPS)
            actions = policy.act(seen[-1], noise[len(steps) % _NOISE_STEPS])
            drawn.append(actions)
            taken = policy.head.to_environment(actions.cpu().numpy())
            played = playing.step(taken)
            if self._on_step is not None:
                self._on_step(seen[-1], taken, played)
            seen.append(playing.observations)
            steps.append(played)
        return _batch(policy, seen, drawn, steps)

    def _noise(self, update: int, block: int) -> Tensor:
        with use_torch_stream(self._seed, Stream.NETWORK_SAMPLING, update, block):
            num_steps = min(_NOISE_STEPS, self._num_steps or _NOISE_STEPS)
            noise = self._policy.head.noise(num_steps, len(self._playing.observations))
        return noise.to(self._policy.device)

    def _is_enough(self, steps: list[Played]) -> bool:
        if self._num_steps is not None:
            return len(steps) >= self._num_steps
        return sum(len(played.episodes) for played in steps) >= self._num_episodes


def _batch(
    policy: Policy, seen: list[np.ndarray], drawn: list[Tensor], steps: list[Played]
) -> Batch:
    device = policy.device
    terminated = np.stack([played.stepped.terminated for played in steps])
    ended = np.stack([played.ended for played in steps])
    cut_off = np.argwhere(ended & ~terminated)
    # Where an episode has ended, `seen` goes on with the first observation of the next one.
    last = [steps[step].stepped.observations[place] for step, place in cut_off]
    rewards = np.stack([played.stepped.rewards for played in steps]).astype(np.float32)
    return Batch(
        observations=policy.to_tensor(np.stack(seen)),
        actions=torch.stack(drawn),
        rewards=torch.from_numpy(rewards).to(device),
        terminated=torch.from_numpy(terminated).to(device),
        ended=torch.from_numpy(ended).to(device),
        cut_off=torch.from_numpy(cut_off).to(device),
        cut_off_observations=policy.to_tensor(np.stack(last) if last else seen[0][:0]),
        episodes=tuple(episode for played in steps for episode in played.episodes),
        ended_at=tuple(t for t, played in enumerate(steps) for _ in played.episodes),
    )

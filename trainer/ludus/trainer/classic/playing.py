"""Episodes that are played side by side: when each begins, what it earned, how it ended.

    seeds --> VectorEnvironment --step--> returns, lengths --> EndedEpisode, one by one

An episode is what its seed and its actions make of it. Both are kept while it goes on, so that a
run that is resumed plays it again, up to where it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.errors import ExecutionError
from ludus.trainer.classic.environments import Stepped, VectorEnvironment

_log = logging.getLogger(__name__)

SeedOf = Callable[[int, int], int | None]
"""(place, number) -> the seed of an environment's n-th episode; None where it plays no more."""


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    """An episode that is over."""

    place: int
    """Of its environment among those side by side."""
    number: int
    """Counts the episodes of this environment, from 0."""
    seed: int
    episode_return: float
    length: int
    terminated: bool
    success: bool | None

    @property
    def outcome(self) -> EpisodeOutcome:
        """How it ended, as evaluations count it."""
        return EpisodeOutcome(self.seed, self.episode_return, self.length, self.success)


@dataclass(frozen=True, slots=True)
class Played:
    """One step of all N episodes."""

    stepped: Stepped
    """Its `truncated` holds the cuts of the run's own limit, too."""
    ended: np.ndarray
    """[N] bool: terminated or truncated."""
    episodes: tuple[EndedEpisode, ...]


@dataclass(slots=True)
class _Episode:
    """One that goes on."""

    number: int
    seed: int | None
    """None where the environment only keeps step with the others."""
    actions: list[np.ndarray] = field(default_factory=list)
    """As the environment was given them."""
    episode_return: float = 0.0


class Playing:
    """N environments, each with the episode that it plays.

    Args:
        max_steps: an episode is cut off after so many; None leaves that to the environment.
        keeps_actions: whether `state` will be asked for.
    """

    def __init__(
        self,
        environments: VectorEnvironment,
        seed_of: SeedOf,
        *,
        max_steps: int | None = None,
        keeps_actions: bool = False,
    ) -> None:
        self._environments = environments
        self._seed_of = seed_of
        self._max_steps = max_steps
        self._keeps_actions = keeps_actions
        self._lengths = np.zeros(environments.num, dtype=np.int64)
        self._returns = np.zeros(environments.num)
        self._episodes: list[_Episode] = []
        self.observations = np.zeros(0)
        """[N, ...]: what is to be acted on next."""

    def begin(self) -> None:
        """Begin the first episode of each environment."""
        self._episodes = [_Episode(-1, None) for _ in range(self._environments.num)]
        self._begin_next(range(self._environments.num))

    @property
    def goes_on(self) -> bool:
        """Whether any environment still plays an episode that counts."""
        return any(episode.seed is not None for episode in self._episodes)

    def step(self, actions: np.ndarray) -> Played:
        """What the actions [N, ...], as the space has them, led to; ended episodes are replaced.

        Raises:
            ExecutionError: the environment pays what is no finite number.
        """
        stepped = self._environments.step(actions)
        self._lengths += 1
        if not np.isfinite(stepped.rewards).all():
            place = int(np.flatnonzero(~np.isfinite(stepped.rewards))[0])
            raise ExecutionError(
                f"the environment paid {stepped.rewards[place]} in step {self._lengths[place]} of "
                "an episode, expected a finite number: nothing can be learned from another one"
            )
        self._returns += stepped.rewards
        if self._keeps_actions:
            for episode, action in zip(self._episodes, actions, strict=True):
                episode.actions.append(action)
        if self._max_steps is not None:
            cut = (self._lengths >= self._max_steps) & ~stepped.terminated
            stepped = Stepped(
                stepped.observations, stepped.rewards, stepped.terminated, stepped.truncated | cut
            )
        ended = stepped.terminated | stepped.truncated
        self.observations = stepped.observations
        if not ended.any():
            return Played(stepped, ended, ())
        places = [int(place) for place in np.flatnonzero(ended)]
        episodes = tuple(self._ended(place, stepped) for place in places if self._counts(place))
        self._begin_next(places)
        return Played(stepped, ended, episodes)

    def state(self) -> list[dict[str, Any]]:
        """Seed, number and actions of each episode that goes on, and what is seen in it."""
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
        """Play the episodes of `state` again, up to where they were.

        All environments step together, so those with fewer actions begin later, and mark time
        until then. Where one does not come to what was seen there, all begin anew.
        """
        episodes = [
            _Episode(one["number"], one["seed"], list(one["actions"].numpy())) for one in state
        ]
        longest = max(len(episode.actions) for episode in episodes)
        waits = [longest - len(episode.actions) for episode in episodes]
        filler = next((e.actions[0] for e in episodes if e.actions), None)
        self._episodes = episodes
        for step in range(longest + 1):
            begins = [p for p, wait in enumerate(waits) if wait == step or step == 0]
            self._reset({place: episodes[place].seed or 0 for place in begins})
            if step == longest:
                break
            actions = [
                filler if step < wait else episode.actions[step - wait]
                for wait, episode in zip(waits, episodes, strict=True)
            ]
            self._mark_time(self._environments.step(np.array(actions)), waits, step)
        seen = np.stack([one["observation"].numpy() for one in state])
        if not np.array_equal(seen, self.observations):
            _log.warning(
                "the environment is not deterministic: episodes that were under way begin anew"
            )
            self._begin_next(range(self._environments.num))

    def _mark_time(self, stepped: Stepped, waits: Sequence[int], step: int) -> None:
        """Take in a step of the episodes that play again; those that wait begin anew at an end."""
        self._lengths += 1
        self._returns += stepped.rewards
        self.observations = stepped.observations
        ended = np.flatnonzero(stepped.terminated | stepped.truncated)
        self._reset({int(p): self._episodes[p].seed or 0 for p in ended if step < waits[p]})

    def _reset(self, seeds: Mapping[int, int]) -> None:
        if not seeds:
            return
        self.observations = self._environments.reset(seeds)
        places = list(seeds)
        self._lengths[places], self._returns[places] = 0, 0.0

    def _begin_next(self, places: Iterable[int]) -> None:
        seeds: dict[int, int] = {}
        for place in places:
            number = self._episodes[place].number + 1
            seed = self._seed_of(place, number)
            self._episodes[place] = _Episode(number, seed)
            seeds[place] = 0 if seed is None else seed
        self._reset(seeds)

    def _counts(self, place: int) -> bool:
        return self._episodes[place].seed is not None

    def _ended(self, place: int, stepped: Stepped) -> EndedEpisode:
        episode, episode_return = self._episodes[place], float(self._returns[place])
        assert episode.seed is not None
        return EndedEpisode(
            place=place,
            number=episode.number,
            seed=episode.seed,
            episode_return=episode_return,
            length=int(self._lengths[place]),
            terminated=bool(stepped.terminated[place]),
            success=self._environments.success(place, episode_return),
        )

"""A policy in its environments, trained update by update; nothing is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.config import NetworkPpoConfig
from ludus.trainer.classic.collector import Batch, Collector, OnStep
from ludus.trainer.classic.environments import VectorEnvironment
from ludus.trainer.classic.playing import Playing
from ludus.trainer.classic.policy import Policy
from ludus.trainer.classic.update import PpoUpdate, UpdateMetrics
from ludus.trainer.core.streams import Stream, training_seed, use_torch_stream

_MAX_JUDGED = 32
"""Environments that an evaluation plays side by side."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One update: what it learned from, and what it came to."""

    batch: Batch
    metrics: UpdateMetrics


class Agent:
    """Trains a policy by PPO.

    Args:
        seed: decides the episodes, the actions and the order of the minibatches.
        max_steps: longest episode; None leaves that to the environment.
        num_episodes: of an update, in place of config.steps_per_environment.
        is_shuffled: the negative control: rewards of a batch are shuffled.
    """

    def __init__(
        self,
        policy: Policy,
        environments: VectorEnvironment,
        config: NetworkPpoConfig,
        *,
        seed: int = 0,
        max_steps: int | None = None,
        num_episodes: int | None = None,
        on_step: OnStep | None = None,
        keeps_actions: bool = False,
        is_shuffled: bool = False,
    ) -> None:
        self.policy = policy
        self.num_updates = 0
        self._seed = seed
        self._is_shuffled = is_shuffled
        self._update = PpoUpdate(policy, config, seed)
        self._playing = Playing(
            environments,
            lambda place, number: training_seed(seed, place, number),
            max_steps=max_steps,
            keeps_actions=keeps_actions,
        )
        self._collector = Collector(
            self._playing,
            policy,
            seed,
            num_steps=config.steps_per_environment if num_episodes is None else None,
            num_episodes=num_episodes or 0,
            on_step=on_step,
        )
        self._has_begun = False

    def train(self, fraction_left: float = 1.0) -> Trained:
        """Play, update, and say what came of it.

        Args:
            fraction_left: of the learning rates.
        """
        if not self._has_begun:
            self._playing.begin()
            self._has_begun = True
        batch = self._collector.collect(self.num_updates)
        learned_from = self._shuffled(batch) if self._is_shuffled else batch
        metrics = self._update.train(learned_from, self.num_updates, fraction_left)
        self.num_updates += 1
        return Trained(batch, metrics)

    def state(self) -> dict[str, Any]:
        """All that it takes to go on as if nothing had happened, in tensors and plain values."""
        scale = self._update.reward_scale
        return {
            "num_updates": self.num_updates,
            "policy": self.policy.state_dict(),
            "optimizer": self._update.optimizer.state(),
            "episodes": self._playing.state(),
            "reward_scale": None if scale is None else scale.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`: the episodes that were under way are played up to there."""
        self.num_updates = state["num_updates"]
        self.policy.load_state_dict(state["policy"])
        self._update.optimizer.restore(state["optimizer"])
        if self._update.reward_scale is not None:
            self._update.reward_scale.restore(state["reward_scale"])
        self._playing.restore(state["episodes"])
        self._has_begun = True

    def _shuffled(self, batch: Batch) -> Batch:
        """The batch with its rewards in another order: nothing is to be learned from it."""
        with use_torch_stream(self._seed, Stream.REWARD_SHUFFLE, self.num_updates):
            order = torch.randperm(batch.num_steps).to(batch.rewards.device)
        rewards = batch.rewards.flatten()[order].view_as(batch.rewards)
        return replace(batch, rewards=rewards)


Chooser = Callable[[np.ndarray, int], np.ndarray]


def judge(
    policy: Policy,
    environments: VectorEnvironment,
    seeds: Sequence[int],
    *,
    is_greedy: bool,
    run_seed: int = 0,
    max_steps: int | None = None,
) -> list[EpisodeOutcome]:
    """The outcome of one episode for each seed, in their order.

    Args:
        is_greedy: takes the likeliest actions; else they are drawn, as in training.
    """
    head = policy.head

    def choose(observations: np.ndarray, step: int) -> np.ndarray:
        noise = None
        if not is_greedy:
            with use_torch_stream(run_seed, Stream.NETWORK_EVALUATION, step):
                noise = head.noise(1, environments.num)[0].to(policy.device)
        return head.to_environment(policy.act(observations, noise).cpu().numpy())

    return play(environments, seeds, choose, max_steps)


def play(
    environments: VectorEnvironment,
    seeds: Sequence[int],
    choose: Chooser,
    max_steps: int | None = None,
) -> list[EpisodeOutcome]:
    """The outcome of one episode for each seed, in their order, by what `choose` does.

    Args:
        choose: (observations, number of the step) -> actions as the space has them.
    """
    num = environments.num

    def seed_of(place: int, number: int) -> int | None:
        index = number * num + place
        return seeds[index] if index < len(seeds) else None

    playing = Playing(environments, seed_of, max_steps=max_steps)
    playing.begin()
    outcomes: dict[int, EpisodeOutcome] = {}
    step = 0
    while playing.goes_on:
        played = playing.step(choose(playing.observations, step))
        outcomes |= {episode.seed: episode.outcome for episode in played.episodes}
        step += 1
    return [outcomes[seed] for seed in seeds]


def num_judged(num_games: int) -> int:
    """How many environments an evaluation of so many games plays side by side.

    As evenly as possible: in a last round of few games all others would step for nothing.
    """
    return math.ceil(num_games / math.ceil(num_games / _MAX_JUDGED))


@contextmanager
def threads(num: int) -> Iterator[None]:
    """Let torch compute with so many threads; with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)

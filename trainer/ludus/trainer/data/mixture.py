"""The choice of environment, index and seeds for each group.

    slot of the run  --(weights)-->  environment e  --(groups started in e)-->  group index

Slots are assigned in exact proportion to the weights. Every slot adds each environment's share to
its credit, and the environment with the most credit gets the slot and pays 1. The sum of the
credits stays 0, so that the counts match the shares at any time, without randomness. (This is the
smooth weighted round robin of nginx.)

The c-th group of environment number e, of E environments, has index c * E + e. So the groups of
an environment, and their seeds, do not depend on the other environments. A group that must be
replaced is replaced by the next group of the same environment.

Replacements are bounded by the order in which they are chosen. Let w be the environment's share of
a batch, and N = algorithm.max_group_batches. From number (N - 2) * w on, the replacements of a step
are final: they are trained on even if they have zero variance. The w first groups and these
(N - 2) * w replacements can be replaced once each, so at most N * w groups are played. The set of
groups that are played does not depend on the order in which they finish.

Usually every seed is a different task, derived from the run's seed and the group's index.
An environment may report the number of its tasks (`TaskSet`), such as the rows of a data set. Then
seed k selects the k-th task. The groups play the tasks in order, and each task is played once
before any is repeated. The task of a zero-variance group is used up. The task of a lost group is
not: it is played again, under a new index.

A curriculum opens the environments one by one. The next environment opens when the win rate of
the hardest open one, over its latest groups, reaches unlock_at. Easier environments keep part of
their weight, so that the policy does not forget them. The environment decides what a win is; an
environment that does not report success cannot open another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.runs import PolicyResult
from ludus.proto.seeds import FIRST_WARM_START_SEED
from ludus.trainer.core.streams import derive_training_seed
from ludus.trainer.core.types import GroupSpec
from ludus.trainer.data.counts import RolloutCounts

_log = logging.getLogger(__name__)

_MAX_REPLACED = 8
"""Maximum number of zero-variance groups in a row before their slot goes to any environment. An
environment that the policy has mastered, or cannot solve at all, would block the batch forever."""

_MAX_LOST = 3
"""Maximum number of lost groups in a row on one task of a data set. A task that kills a server or
takes too long would be repeated forever."""


@dataclass(frozen=True, slots=True)
class WinCount:
    """Wins of the groups that finished between two batches."""

    num_groups: int
    """Number of groups that are not void."""
    num_finished: Annotated[int, Field(alias="num_scored")]
    """Number of episodes that were won, drawn or lost."""
    num_wins: int


@dataclass(slots=True)
class MixtureState:
    """The state of the mixture; part of a checkpoint."""

    names: list[str] = field(default_factory=list)
    """Names of the environments that have group indices, in order."""
    num_indices: Annotated[dict[str, int], Field(alias="num_begun")] = field(default_factory=dict)
    """Number of groups that got an index, by environment."""
    num_new_tasks: Annotated[dict[str, int], Field(alias="num_dealt")] = field(default_factory=dict)
    """Number of groups that got a new task, by environment."""
    credits: dict[str, float] = field(default_factory=dict)
    num_open: int = 1
    """Number of environments that the curriculum has opened."""
    num_replacements: dict[str, int] = field(default_factory=dict)
    """Number of replacements since the last step, by environment."""
    wins: list[WinCount] = field(default_factory=list)
    """Wins in the hardest open environment, oldest first, over at most window_groups groups."""


class Mixture:
    """The choice of the groups of a run, which updates `state`."""

    def __init__(
        self, run: LanguageModelRun, state: MixtureState, num_tasks: Mapping[str, int] | None = None
    ) -> None:
        """`num_tasks` is the number of tasks by environment, for environments that report it."""
        self._run = run
        self.state = state
        self._num_tasks = num_tasks or {}
        names = list(run.environments)
        if state.names != names:
            # The environments have changed: start above all indices used so far.
            num_used = max(state.num_indices.values(), default=0) * len(state.names)
            state.num_indices = dict.fromkeys(names, -(-num_used // len(names)))
            state.names = names
            state.credits = {name: state.credits.get(name, 0.0) for name in names}
        state.num_open = min(state.num_open, len(names))

    @property
    def num_open(self) -> int | None:
        """Number of environments that the curriculum has opened; None without a curriculum."""
        return None if self._run.curriculum is None else self.state.num_open

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the open environments."""
        weights = {name: config.weight for name, config in self._run.environments.items()}
        curriculum = self._run.curriculum
        if curriculum is None:
            return weights
        names = list(weights)[: self.state.num_open]
        lowered_weights = {name: weights[name] * curriculum.mastered_weight for name in names[:-1]}
        return {**lowered_weights, names[-1]: weights[names[-1]]}

    def take_next_group(self) -> GroupSpec:
        """Return the group of the next slot."""
        weights, credits = self.weights, self.state.credits
        weight_sum = sum(weights.values())
        for name, weight in weights.items():
            credits[name] += weight / weight_sum
        # Rounding makes a tie always go to the first environment, despite float errors.
        chosen_name = max(weights, key=lambda name: round(credits[name], 9))
        credits[chosen_name] -= 1.0
        return self._make_group(chosen_name)

    def replace_group(self, spec: GroupSpec, *, is_lost: bool = False) -> GroupSpec:
        """Return the replacement of a group that was lost, or from which nothing was learned."""
        if is_lost and spec.environment in self._num_tasks and spec.num_lost < _MAX_LOST:
            index = self._take_next_index(spec.environment)
            return replace(spec, index=index, num_lost=spec.num_lost + 1)
        if spec.num_replaced >= _MAX_REPLACED and len(self.weights) > 1:
            group = self.take_next_group()
            return replace(group, is_final=self._count_replacement(group.environment))
        return replace(
            self._make_group(spec.environment),
            num_replaced=spec.num_replaced + 1,
            is_final=self._count_replacement(spec.environment),
        )

    def start_step(self) -> None:
        """Start counting the replacements of the next step."""
        self.state.num_replacements.clear()

    def reissue_group(self, spec: GroupSpec) -> GroupSpec:
        """Return a group for the same slot, with an index that was never used."""
        if spec.environment in self._num_tasks:
            return replace(spec, index=self._take_next_index(spec.environment))
        group = self._make_group(spec.environment)
        return replace(group, num_replaced=spec.num_replaced, is_final=spec.is_final)

    def observe(self, counts: Mapping[str, RolloutCounts]) -> str | None:
        """Count wins; return the name of the environment that the curriculum now opens, or None.

        Raises:
            ConfigError: the hardest open environment does not report success.
        """
        curriculum, state = self._run.curriculum, self.state
        if curriculum is None or state.num_open == len(state.names):
            return None
        name = state.names[state.num_open - 1]
        new_counts = counts.get(name, RolloutCounts())
        if new_counts.num_terminated and not new_counts.num_judged:
            raise ConfigError(
                f"environment '{name}' does not report success ({new_counts.num_terminated} "
                "episodes ended without it), which curriculum.unlock_at needs; set success in its "
                "last transition (a rollout function passes it on in Ended), or remove section "
                "curriculum"
            )
        num_valid_groups = new_counts.num_groups - new_counts.num_void_groups
        if not num_valid_groups:
            return None
        num_finished = new_counts.num_wins + new_counts.num_draws + new_counts.num_losses
        state.wins.append(WinCount(num_valid_groups, num_finished, new_counts.num_wins))
        num_groups = sum(wins.num_groups for wins in state.wins)
        while num_groups - state.wins[0].num_groups >= curriculum.window_groups:
            num_groups -= state.wins.pop(0).num_groups
        num_wins = sum(wins.num_wins for wins in state.wins)
        min_wins = curriculum.unlock_at * sum(wins.num_finished for wins in state.wins)
        if num_groups >= curriculum.window_groups and num_wins >= min_wins > 0:
            state.num_open += 1
            state.wins.clear()
            return state.names[state.num_open - 1]
        return None

    def warn_if_success_is_missing(self, results: Mapping[str, PolicyResult]) -> None:
        """Log the environments that did not report success in any evaluated episode.

        An untrained policy may not reach the end of an episode, so this is not an error.
        """
        required_names = self.state.names[:-1] if self._run.curriculum is not None else []
        for name in required_names:
            result = results.get(name)
            if result is not None and result.win_rate is None:
                _log.warning(
                    "environment '%s' did not report success in any of %d evaluated episodes; "
                    "curriculum.unlock_at counts successes to open the next environment",
                    name,
                    result.num_games,
                )

    def roll_back(self, earlier_state: MixtureState) -> None:
        """Restore an earlier state, except for the indices, which are never used twice."""
        names = self.state.names
        self.state.credits = {name: earlier_state.credits.get(name, 0.0) for name in names}
        self.state.num_new_tasks = {
            name: earlier_state.num_new_tasks.get(name, 0) for name in names
        }
        self.state.num_open = earlier_state.num_open
        self.state.num_replacements = dict(earlier_state.num_replacements)
        self.state.wins = list(earlier_state.wins)

    def _count_replacement(self, name: str) -> bool:
        """Count a replacement of this step; return whether it is final."""
        number = self.state.num_replacements.get(name, 0)
        self.state.num_replacements[name] = number + 1
        weights, num_groups = self.weights, self._run.training.groups_per_step
        share = weights.get(name, 0.0) / sum(weights.values())
        num_batches = self._run.algorithm.max_group_batches - 2
        return number >= num_batches * max(1, math.ceil(round(share * num_groups, 9)))

    def _make_group(self, name: str) -> GroupSpec:
        index, task_number = self._take_next_index(name), self.state.num_new_tasks.get(name, 0)
        self.state.num_new_tasks[name] = task_number + 1
        return GroupSpec(index, name, self._select_seeds(name, index, task_number))

    def _select_seeds(self, name: str, index: int, task_number: int) -> tuple[int, ...]:
        """Return the seeds [G] of group `index`, which gets the environment's next new task."""
        rollout = self._run.rollout
        is_shared = rollout.group_seed == "shared"
        if name not in self._num_tasks:
            return derive_group_seeds(self._run.seed, index, rollout.group_size, shared=is_shared)
        size, first_task = rollout.group_size, task_number * rollout.group_size
        tasks = [task_number] * size if is_shared else range(first_task, first_task + size)
        # Maximum number of whole epochs whose seeds are below the seeds of the warm start.
        num_epochs = max(1, FIRST_WARM_START_SEED // self._num_tasks[name])
        num_usable_tasks = num_epochs * self._num_tasks[name]
        return tuple(task % num_usable_tasks for task in tasks)

    def _take_next_index(self, name: str) -> int:
        state = self.state
        index = state.num_indices[name] * len(state.names) + state.names.index(name)
        state.num_indices[name] += 1
        return index


def derive_group_seeds(
    run_seed: int, index: int, group_size: int, *, shared: bool
) -> tuple[int, ...]:
    """Return the seeds [G] of group `index`; warm start and evaluations use other seeds."""
    episodes = [0] * group_size if shared else range(group_size)
    return tuple(derive_training_seed(run_seed, index, episode) for episode in episodes)

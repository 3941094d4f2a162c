"""In which environment each group is played, and what number it gets.

    place p of the run  --(weights)-->  environment e  --(groups begun in e)-->  group index

Places are dealt out in exact proportion to the weights: every place adds each environment's
share to its credit, and the environment with the most credit pays 1 for it. Credits add up to
nothing, so the counts follow the shares place by place; no coin is tossed. (The smooth weighted
round robin of nginx.)

The c-th group of environment number e, of E, has index c * E + e. So what is played in an
environment, and the seeds of it, do not depend on which places others took, and a group that
must be replaced is replaced by the next one of the same environment.

Where the tasks of an environment are counted, its groups take one after the other
(`data/seeds.py`). A group that taught nothing has had its task. One that was lost without its
fault has not: it is played again on the same, under an index of its own.

With a curriculum the environments are opened one by one: the next when the win rate of the
hardest open one, over its newest groups, reaches unlock_at; those below it keep part of their
weight, so that they are not forgotten. What a win is, the environment says; one that does not say
it cannot open another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.runs import PolicyResult
from ludus.trainer.core.types import GroupSpec
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.seeds import GroupSeeds

_log = logging.getLogger(__name__)

_MAX_REPLACED = 8
"""Groups in a row that may teach nothing before their place goes to any environment: one that
the policy has mastered or cannot begin to solve would hold up the batch for ever."""

_MAX_LOST = 3
"""Groups in a row that may be lost on one task of a data set: what ends a server or takes too
long would do so for ever."""


@dataclass(frozen=True, slots=True)
class WinCount:
    """Games of groups that finished between two batches."""

    num_groups: int
    num_scored: int
    num_wins: int


@dataclass(slots=True)
class MixtureState:
    """Where the mixture stands; part of a checkpoint."""

    names: list[str] = field(default_factory=list)
    """The environments for which group indices were given, in their order."""
    num_begun: dict[str, int] = field(default_factory=dict)
    """Groups that got an index, by environment."""
    num_dealt: dict[str, int] = field(default_factory=dict)
    """Groups that got a task which none had before, by environment."""
    credits: dict[str, float] = field(default_factory=dict)
    num_open: int = 1
    """Environments that the curriculum has opened."""
    wins: list[WinCount] = field(default_factory=list)
    """Of the hardest open environment, oldest first: no more than window_groups groups take."""


def _says_no_success(name: str, num_episodes: int) -> str:
    return (
        f"curriculum.unlock_at expected environment '{name}' to say whether its episodes succeed, "
        f"got {num_episodes} that ended without a word; set success in its last transition (a "
        "rollout function passes it on in Ended), or take section curriculum out"
    )


class Mixture:
    """Deals out the groups of a run; `state` is its own and moves with it."""

    def __init__(self, run: LanguageModelRun, state: MixtureState, seeds: GroupSeeds) -> None:
        self._run = run
        self._state = state
        self._seeds = seeds
        names = list(run.environments)
        if state.names != names:
            # Other environments than before: begin where no index was given yet.
            used = max((n * len(state.names) for n in state.num_begun.values()), default=0)
            state.num_begun = dict.fromkeys(names, -(-used // len(names)))
            state.names = names
            state.credits = {name: state.credits.get(name, 0.0) for name in names}
        state.num_open = min(state.num_open, len(names))

    @property
    def state(self) -> MixtureState:
        """Where it stands."""
        return self._state

    @property
    def num_open(self) -> int | None:
        """Environments that the curriculum has opened; None without one."""
        return None if self._run.curriculum is None else self._state.num_open

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the environments that are open now."""
        configured = {name: e.weight for name, e in self._run.environments.items()}
        curriculum = self._run.curriculum
        if curriculum is None:
            return configured
        names = list(configured)[: self._state.num_open]
        lowered = {name: configured[name] * curriculum.mastered_weight for name in names[:-1]}
        return {**lowered, names[-1]: configured[names[-1]]}

    def next_group(self) -> GroupSpec:
        """The group of the next place."""
        weights, credits = self.weights, self._state.credits
        whole = sum(weights.values())
        for name, weight in weights.items():
            credits[name] += weight / whole
        # The first of those with the most: a tie must not depend on rounding in other places.
        chosen = max(weights, key=lambda name: round(credits[name], 9))
        credits[chosen] -= 1.0
        return self._make(chosen)

    def replacement(self, spec: GroupSpec, *, is_lost: bool = False) -> GroupSpec:
        """The group that takes the place of one that taught nothing, or was lost."""
        if is_lost and self._keeps_task(spec) and spec.num_lost < _MAX_LOST:
            return replace(self._with_task_of(spec), num_lost=spec.num_lost + 1)
        if spec.num_replaced >= _MAX_REPLACED and len(self.weights) > 1:
            return self.next_group()
        return replace(self._make(spec.environment), num_replaced=spec.num_replaced + 1)

    def renewed(self, spec: GroupSpec) -> GroupSpec:
        """The same place under an index that no group ever had."""
        if self._keeps_task(spec):
            return self._with_task_of(spec)
        return replace(self._make(spec.environment), num_replaced=spec.num_replaced)

    def observe(self, counts: Mapping[str, RolloutCounts]) -> str | None:
        """The environment that is opened now, since the hardest open one is mastered; or None.

        Raises:
            ConfigError: its episodes end without a word on whether they succeeded.
        """
        curriculum, state = self._run.curriculum, self._state
        if curriculum is None or state.num_open == len(state.names):
            return None
        hardest = state.names[state.num_open - 1]
        of_hardest = counts.get(hardest, RolloutCounts())
        if of_hardest.num_terminated and not of_hardest.num_judged:
            raise ConfigError(_says_no_success(hardest, of_hardest.num_terminated))
        state.wins.append(
            WinCount(of_hardest.num_groups, of_hardest.num_scored, of_hardest.num_wins)
        )
        num_groups = sum(one.num_groups for one in state.wins)
        while num_groups - state.wins[0].num_groups >= curriculum.window_groups:
            num_groups -= state.wins.pop(0).num_groups
        num_wins = sum(one.num_wins for one in state.wins)
        num_needed = curriculum.unlock_at * sum(one.num_scored for one in state.wins)
        if num_groups >= curriculum.window_groups and num_wins >= num_needed > 0:
            state.num_open += 1
            state.wins.clear()
            return state.names[state.num_open - 1]
        return None

    def expect_success(self, judged: Mapping[str, PolicyResult]) -> None:
        """Log which environments said of none of their evaluated games whether it succeeded.

        An untrained policy may have come to the end of none, so this is no reason to stop.
        """
        needed = self._state.names[:-1] if self._run.curriculum is not None else []
        for name in needed:
            result = judged.get(name)
            if result is not None and result.win_rate is None:
                _log.warning(
                    "environment '%s' said of none of %d evaluated games whether it succeeded; "
                    "curriculum.unlock_at counts successes to open the next environment",
                    name,
                    result.num_games,
                )

    def go_back_to(self, earlier: MixtureState) -> None:
        """Go back to where it stood, but for the indices, which are given once only."""
        names = self._state.names
        self._state.credits = {name: earlier.credits.get(name, 0.0) for name in names}
        self._state.num_dealt = {name: earlier.num_dealt.get(name, 0) for name in names}
        self._state.num_open = earlier.num_open
        self._state.wins = list(earlier.wins)

    def _make(self, name: str) -> GroupSpec:
        index, place = self._next_index(name), self._state.num_dealt.get(name, 0)
        self._state.num_dealt[name] = place + 1
        return GroupSpec(index, name, self._seeds.of(name, index, place))

    def _keeps_task(self, spec: GroupSpec) -> bool:
        return self._seeds.are_counted(spec.environment)

    def _with_task_of(self, spec: GroupSpec) -> GroupSpec:
        return replace(spec, index=self._next_index(spec.environment))

    def _next_index(self, name: str) -> int:
        state = self._state
        index = state.num_begun[name] * len(state.names) + state.names.index(name)
        state.num_begun[name] += 1
        return index

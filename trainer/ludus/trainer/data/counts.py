"""Counts of episodes and groups, which can be added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from ludus.env.evaluation import OutcomeKind, classify_outcome
from ludus.proto.config import AlgorithmConfig, GrpoConfig
from ludus.trainer.core.types import Rollout, RolloutGroup, RolloutStatus
from ludus.trainer.data.failures import Failures, add_failures, count_failures

VarianceTest = Callable[[RolloutGroup], bool]
"""Function that returns whether all advantages of a group are zero."""


@dataclass(frozen=True, slots=True)
class TermSum:
    """A sum of the values of one reward term, before weighting."""

    num_scored: int = 0
    total: float = 0.0

    def __add__(self, other: TermSum) -> TermSum:
        return TermSum(self.num_scored + other.num_scored, self.total + other.total)


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """Counts of episodes and groups."""

    num_episodes: int = 0
    num_scored: int = 0
    """Number of episodes with a reward."""
    num_lost: int = 0
    num_failed: int = 0
    num_invalid: int = 0
    num_truncated: int = 0
    num_tool_calls: int = 0
    num_tool_calls_failed: int = 0
    num_with_tool_calls: int = 0
    """Number of episodes with at least one tool call, failed or not."""
    num_branches: int = 0
    """Number of sequences that branch off another sequence of their episode."""
    num_dead_agents: int = 0
    """Number of episodes that are void because their agent failed, or did not finish in time."""
    num_terminated: int = 0
    num_judged: int = 0
    """Number of episodes whose success the environment reported. If it is 0, the numbers of wins,
    draws and losses have no meaning."""
    num_wins: int = 0
    """Number of successful episodes. An episode without success and with return 0 is a draw."""
    num_draws: int = 0
    num_losses: int = 0
    num_groups: int = 0
    num_zero_variance_groups: int = 0
    num_replaced_groups: int = 0
    """Number of zero-variance groups that were replaced."""
    num_kept_groups: int = 0
    """Number of zero-variance groups that were kept, because others were replaced too often."""
    num_void_groups: int = 0
    """Number of groups with fewer than two scored episodes, or with masked episodes only."""
    num_stale_groups: int = 0
    """Number of groups older than the staleness bound."""
    num_rolled_back_groups: int = 0
    """Number of groups that were played for a learner that has died since."""
    num_tokens_generated: int = 0
    num_turns: int = 0
    reward_sum: float = 0.0
    reward_square_sum: float = 0.0
    terms: Mapping[str, TermSum] = field(default_factory=dict)
    """Sums of the reward terms, by name."""
    failures: Failures = field(default_factory=dict)
    """Reasons for which episodes were lost or failed."""

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        names = [count.name for count in fields(self) if count.name not in ("terms", "failures")]
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        terms = _add_terms(self.terms, other.terms)
        return RolloutCounts(
            **sums, terms=terms, failures=add_failures(self.failures, other.failures)
        )


def sum_counts(counts: Iterable[RolloutCounts]) -> RolloutCounts:
    """Return the sum of counts."""
    return sum(counts, RolloutCounts())


def compute_turn_rewards(rollout: Rollout) -> list[float]:
    """Return the share [K] of each turn in the training reward, which is the sum of the shares."""
    rewards = [turn.reward for turn in rollout.turns]
    if rewards and rollout.reward is not None:
        rewards[-1] += rollout.reward - sum(rewards)
    return rewards


def has_equal_rewards(group: RolloutGroup) -> bool:
    """Return whether all rewards of the group are equal."""
    return len({reward for reward in group.rewards if reward is not None}) < 2


def choose_variance_test(algorithm: AlgorithmConfig) -> VarianceTest:
    """Return the function that tests whether all advantages of a group are zero.

    A user's function of advantages may tell episodes with equal rewards apart, so none of its
    groups has zero variance.
    """
    if not isinstance(algorithm, GrpoConfig):
        return has_equal_rewards
    if algorithm.advantages is not None:
        return lambda group: False
    if algorithm.credit == "turn":
        return partial(_has_equal_turn_returns, gamma=algorithm.gamma)
    return has_equal_rewards


def _has_equal_turn_returns(group: RolloutGroup, gamma: float) -> bool:
    """Return whether, for each turn, all episodes that reach it have equal returns from there."""
    returns_by_turn: dict[int, set[float]] = {}
    for rollout in group.rollouts:
        if rollout.reward is None:
            continue
        turn_return = 0.0
        for index, reward in reversed(list(enumerate(compute_turn_rewards(rollout)))):
            turn_return = reward + gamma * turn_return
            returns_by_turn.setdefault(index, set()).add(turn_return)
    return all(len(returns) < 2 for returns in returns_by_turn.values())


def count_group(
    group: RolloutGroup, has_zero_variance: VarianceTest = has_equal_rewards
) -> RolloutCounts:
    """Return the counts of one finished group."""
    rewards = [reward for reward in group.rewards if reward is not None]
    is_any_trained = any(
        rollout.reward is not None and not rollout.is_masked for rollout in group.rollouts
    )
    statuses = [rollout.status for rollout in group.rollouts]
    finished_rollouts = [
        rollout for rollout in group.rollouts if rollout.episode_return is not None
    ]
    outcomes = Counter(
        classify_outcome(rollout.episode_return or 0.0, rollout.success)
        for rollout in finished_rollouts
    )
    return RolloutCounts(
        num_episodes=len(statuses),
        num_scored=len(rewards),
        num_lost=statuses.count(RolloutStatus.LOST),
        num_failed=statuses.count(RolloutStatus.FAILED),
        num_invalid=statuses.count(RolloutStatus.INVALID_ACTION),
        num_truncated=statuses.count(RolloutStatus.TRUNCATED),
        num_tool_calls=sum(rollout.num_tool_calls for rollout in group.rollouts),
        num_tool_calls_failed=sum(rollout.num_tool_calls_failed for rollout in group.rollouts),
        num_with_tool_calls=sum(rollout.num_tool_calls > 0 for rollout in group.rollouts),
        num_branches=sum(rollout.num_branches for rollout in group.rollouts),
        num_dead_agents=sum(rollout.has_agent_failed for rollout in group.rollouts),
        num_terminated=statuses.count(RolloutStatus.TERMINATED),
        num_judged=sum(rollout.success is not None for rollout in finished_rollouts),
        num_wins=outcomes[OutcomeKind.WON],
        num_draws=outcomes[OutcomeKind.DRAWN],
        num_losses=outcomes[OutcomeKind.LOST],
        num_groups=1,
        num_zero_variance_groups=int(len(rewards) >= 2 and has_zero_variance(group)),
        num_void_groups=int(len(rewards) < 2 or not is_any_trained),
        num_tokens_generated=sum(rollout.num_tokens_sampled for rollout in group.rollouts),
        num_turns=sum(len(rollout.turns) for rollout in group.rollouts),
        reward_sum=sum(rewards),
        reward_square_sum=sum(reward * reward for reward in rewards),
        terms=_sum_terms(group),
        failures=count_failures(rollout.failure for rollout in group.rollouts if rollout.failure),
    )


def _sum_terms(group: RolloutGroup) -> dict[str, TermSum]:
    sums: dict[str, TermSum] = {}
    for rollout in group.rollouts:
        for term in rollout.terms:
            term_sum = TermSum() if term.value is None else TermSum(1, term.value)
            sums[term.name] = sums.get(term.name, TermSum()) + term_sum
    return sums


def _add_terms(first: Mapping[str, TermSum], second: Mapping[str, TermSum]) -> dict[str, TermSum]:
    names = dict.fromkeys([*first, *second])
    return {name: first.get(name, TermSum()) + second.get(name, TermSum()) for name in names}

"""What happened to episodes and groups: sums, so that counts of any parts can be added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ludus.env.evaluation import OutcomeKind, classify_outcome
from ludus.trainer.core.types import RolloutGroup, RolloutStatus
from ludus.trainer.data.failures import Failures, add_failures, count_failures


@dataclass(frozen=True, slots=True)
class TermSum:
    """The values of one reward term, before its weight."""

    num_scored: int = 0
    total: float = 0.0

    def __add__(self, other: TermSum) -> TermSum:
        return TermSum(self.num_scored + other.num_scored, self.total + other.total)


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """What happened to episodes and groups since the last count."""

    num_episodes: int = 0
    num_scored: int = 0
    """Episodes that have a reward."""
    num_lost: int = 0
    num_failed: int = 0
    num_invalid: int = 0
    num_truncated: int = 0
    num_tool_calls: int = 0
    num_tool_calls_failed: int = 0
    num_with_tool_calls: int = 0
    """Episodes with at least one, failed or not."""
    num_branches: int = 0
    """Sequences that begin where another one of their episode went on."""
    num_dead_agents: int = 0
    """Episodes that are void because their agent failed, or did not end in time."""
    num_terminated: int = 0
    num_judged: int = 0
    """Episodes of which the environment said whether they succeeded: with none of them, wins,
    draws and losses say nothing."""
    num_wins: int = 0
    """Episodes that succeeded; of the others, draws had a return of 0."""
    num_draws: int = 0
    num_losses: int = 0
    num_groups: int = 0
    num_zero_variance_groups: int = 0
    num_void_groups: int = 0
    """Groups in which fewer than two episodes could be scored."""
    num_stale_groups: int = 0
    """Groups that were older than the staleness bound allows."""
    num_rolled_back_groups: int = 0
    """Groups that were played for a learner which has died since."""
    num_tokens_generated: int = 0
    num_turns: int = 0
    reward_sum: float = 0.0
    reward_square_sum: float = 0.0
    terms: Mapping[str, TermSum] = field(default_factory=dict)
    """By name."""
    failures: Failures = field(default_factory=dict)
    """Why episodes were lost or failed."""

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        sums: dict[str, Any] = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name not in ("terms", "failures")
        }
        return RolloutCounts(
            **sums,
            terms=_add_terms(self.terms, other.terms),
            failures=add_failures(self.failures, other.failures),
        )


def total(counts: Iterable[RolloutCounts]) -> RolloutCounts:
    """The counts of the whole, from those of its parts."""
    return sum(counts, RolloutCounts())


def count_group(group: RolloutGroup) -> RolloutCounts:
    """The counts of one finished group."""
    scored = [reward for reward in group.rewards if reward is not None]
    statuses = [rollout.status for rollout in group.rollouts]
    finished = [r for r in group.rollouts if r.episode_return is not None]
    standings = Counter(classify_outcome(r.episode_return or 0.0, r.success) for r in finished)
    return RolloutCounts(
        num_episodes=len(statuses),
        num_scored=len(scored),
        num_lost=statuses.count(RolloutStatus.LOST),
        num_failed=statuses.count(RolloutStatus.FAILED),
        num_invalid=statuses.count(RolloutStatus.INVALID_ACTION),
        num_truncated=statuses.count(RolloutStatus.TRUNCATED),
        num_tool_calls=sum(rollout.num_tool_calls for rollout in group.rollouts),
        num_tool_calls_failed=sum(rollout.num_tool_calls_failed for rollout in group.rollouts),
        num_with_tool_calls=sum(rollout.num_tool_calls > 0 for rollout in group.rollouts),
        num_branches=sum(rollout.num_branches for rollout in group.rollouts),
        num_dead_agents=sum(rollout.agent_died for rollout in group.rollouts),
        num_terminated=statuses.count(RolloutStatus.TERMINATED),
        num_judged=sum(r.success is not None for r in finished),
        num_wins=standings[OutcomeKind.WON],
        num_draws=standings[OutcomeKind.DRAWN],
        num_losses=standings[OutcomeKind.LOST],
        num_groups=1,
        num_zero_variance_groups=int(len(scored) >= 2 and group.has_zero_variance),
        num_void_groups=int(len(scored) < 2),
        num_tokens_generated=sum(rollout.num_tokens_sampled for rollout in group.rollouts),
        num_turns=sum(len(rollout.turns) for rollout in group.rollouts),
        reward_sum=sum(scored),
        reward_square_sum=sum(reward * reward for reward in scored),
        terms=_count_terms(group),
        failures=count_failures(r.failure for r in group.rollouts if r.failure),
    )


def _count_terms(group: RolloutGroup) -> dict[str, TermSum]:
    sums: dict[str, TermSum] = {}
    for rollout in group.rollouts:
        for term in rollout.terms:
            one = TermSum() if term.value is None else TermSum(1, term.value)
            sums[term.name] = sums.get(term.name, TermSum()) + one
    return sums


def _add_terms(one: Mapping[str, TermSum], other: Mapping[str, TermSum]) -> dict[str, TermSum]:
    names = dict.fromkeys([*one, *other])
    return {name: one.get(name, TermSum()) + other.get(name, TermSum()) for name in names}

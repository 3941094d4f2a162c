"""Counts of episodes in groups, and sums of counts."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add

from ludus.trainer.core.types import RolloutStatus, ScoredTerm
from ludus.trainer.data.counts import RolloutCounts, TermSum, count_group, sum_counts
from ludus.trainer.run.checkpoint import RunState
from tests.data.rollouts import make_group


def test_lost_episode_is_not_counted_as_win_draw_or_loss() -> None:
    counts = count_group(make_group(1, 0, -1, -1, None))
    assert (counts.num_wins, counts.num_draws, counts.num_losses) == (1, 1, 2)
    assert (counts.num_scored, counts.num_lost) == (4, 1)
    assert (counts.reward_sum, counts.reward_square_sum) == (-1, 3)


def test_lost_and_failed_episodes_are_counted_separately() -> None:
    group = make_group(1, 0, -1)
    failures = [(RolloutStatus.LOST, "away"), (RolloutStatus.FAILED, "bug 1")]
    void_rollouts = [
        replace(rollout, reward=None, episode_return=None, status=status, failure=reason)
        for rollout, (status, reason) in zip(group.rollouts, failures, strict=False)
    ]
    counts = count_group(replace(group, rollouts=(*void_rollouts, group.rollouts[2])))
    assert (counts.num_lost, counts.num_failed, counts.num_scored) == (1, 1, 1)
    assert counts.num_void_groups == 1
    total_counts = counts + counts
    assert {kind: count.num_episodes for kind, count in total_counts.failures.items()} == {
        "away": 2,
        "bug #": 2,
    }


def test_checkpoint_contains_failure_reasons() -> None:
    [failed_rollout] = [
        replace(rollout, reward=None, status=RolloutStatus.FAILED, failure="bug 1")
        for rollout in make_group(1).rollouts
    ]
    counts = count_group(replace(make_group(1), rollouts=(failed_rollout,)))
    text = RunState(counts={"coins": counts}).model_dump_json()
    assert RunState.model_validate_json(text).counts == {"coins": counts}


def test_tool_calls_are_counted() -> None:
    call_counts = [(3, 1), (0, 0), (1, 1)]
    rollouts = [
        replace(rollout, num_tool_calls=num_calls, num_tool_calls_failed=num_failed)
        for rollout, (num_calls, num_failed) in zip(
            make_group(1, 0, -1).rollouts, call_counts, strict=True
        )
    ]
    counts = count_group(replace(make_group(1), rollouts=tuple(rollouts)))
    total_counts = counts + counts
    assert (
        total_counts.num_tool_calls,
        total_counts.num_tool_calls_failed,
        total_counts.num_with_tool_calls,
    ) == (
        8,
        4,
        4,
    )


def test_wins_are_counted_by_reported_success() -> None:
    group = make_group(1, -1)
    success_rollout, failure_rollout = (
        replace(rollout, reward=5.0, episode_return=episode_return, success=success)
        for rollout, episode_return, success in zip(
            group.rollouts, (-13.0, 4.0), (True, False), strict=True
        )
    )
    counts = count_group(replace(group, rollouts=(success_rollout, failure_rollout)))
    assert (counts.num_judged, counts.num_wins, counts.num_losses) == (2, 1, 1)


def test_return_of_zero_up_to_rounding_is_a_draw() -> None:
    [rollout] = make_group(1).rollouts
    episode_return = reduce(add, [-0.1] * 9 + [0.9])  # sum() would remove the rounding error
    assert episode_return > 0
    drawn_rollout = replace(rollout, episode_return=episode_return, success=False)
    counts = count_group(replace(make_group(1), rollouts=(drawn_rollout,)))
    assert (counts.num_wins, counts.num_draws, counts.num_losses) == (0, 1, 0)


def test_episodes_without_reported_success_are_not_in_win_counts() -> None:
    rollouts = [replace(rollout, success=None) for rollout in make_group(200, 17, 9).rollouts]
    counts = count_group(replace(make_group(1, 1, 1), rollouts=tuple(rollouts)))
    assert (counts.num_judged, counts.num_wins, counts.num_terminated) == (0, 0, 3)


def test_reward_terms_are_summed_by_name_ignoring_missing_values() -> None:
    group = make_group(1, -1)
    terms = [
        (ScoredTerm("format", 0.5), ScoredTerm("style", None)),
        (ScoredTerm("format", 0.25), ScoredTerm("style", 2.0)),
    ]
    rollouts = [
        replace(rollout, terms=rollout_terms)
        for rollout, rollout_terms in zip(group.rollouts, terms, strict=True)
    ]
    counts = count_group(replace(group, rollouts=tuple(rollouts)))
    assert counts.terms == {"format": TermSum(2, 0.75), "style": TermSum(1, 2.0)}
    assert sum_counts([counts, counts, RolloutCounts()]).terms["format"] == TermSum(4, 1.5)

"""Counts of parts add up to the counts of the whole."""

from __future__ import annotations

from dataclasses import replace

from ludus.trainer.core.types import RolloutStatus, ScoredTerm
from ludus.trainer.data.counts import RolloutCounts, TermSum, count_group, total
from ludus.trainer.run.checkpoint import RunState
from tests.data.rollouts import make_group


def test_a_lost_episode_counts_neither_as_win_nor_as_draw_nor_as_loss() -> None:
    counts = count_group(make_group(1, 0, -1, -1, None))
    assert (counts.num_wins, counts.num_draws, counts.num_losses) == (1, 1, 2)
    assert (counts.num_scored, counts.num_lost) == (4, 1)
    assert (counts.reward_sum, counts.reward_square_sum) == (-1, 3)


def test_failed_episodes_are_counted_apart_from_lost_ones_with_the_reasons_of_both() -> None:
    group = make_group(1, 0, -1)
    fates = [(RolloutStatus.LOST, "away"), (RolloutStatus.FAILED, "bug 1")]
    void = [
        replace(r, reward=None, episode_return=None, status=status, failure=reason)
        for r, (status, reason) in zip(group.rollouts, fates, strict=False)
    ]
    counts = count_group(replace(group, rollouts=(*void, group.rollouts[2])))
    assert (counts.num_lost, counts.num_failed, counts.num_scored) == (1, 1, 1)
    assert counts.num_void_groups == 1
    both = counts + counts
    assert {kind: count.num_episodes for kind, count in both.failures.items()} == {
        "away": 2,
        "bug #": 2,
    }


def test_a_checkpoint_keeps_the_reasons() -> None:
    [failed] = [
        replace(r, reward=None, status=RolloutStatus.FAILED, failure="bug 1")
        for r in make_group(1).rollouts
    ]
    counts = count_group(replace(make_group(1), rollouts=(failed,)))
    written = RunState(counts={"coins": counts}).model_dump_json()
    assert RunState.model_validate_json(written).counts == {"coins": counts}


def test_calls_of_tools_are_counted_and_the_episodes_that_made_any() -> None:
    calls = [(3, 1), (0, 0), (1, 1)]
    rollouts = [
        replace(rollout, num_tool_calls=num, num_tool_calls_failed=failed)
        for rollout, (num, failed) in zip(make_group(1, 0, -1).rollouts, calls, strict=True)
    ]
    counts = count_group(replace(make_group(1), rollouts=tuple(rollouts)))
    both = counts + counts
    assert (both.num_tool_calls, both.num_tool_calls_failed, both.num_with_tool_calls) == (8, 4, 4)


def test_wins_are_what_the_environment_says_not_what_it_paid_nor_the_reward() -> None:
    group = make_group(1, -1)
    dear, cheap = (
        replace(r, reward=5.0, episode_return=paid, success=success)
        for r, paid, success in zip(group.rollouts, (-13.0, 4.0), (True, False), strict=True)
    )
    counts = count_group(replace(group, rollouts=(dear, cheap)))
    assert (counts.num_judged, counts.num_wins, counts.num_losses) == (2, 1, 1)


def test_a_return_that_is_nothing_but_for_rounding_is_a_draw() -> None:
    [rollout] = make_group(1).rollouts
    earned = sum([-0.1] * 9 + [0.9])
    assert earned > 0
    drawn = replace(rollout, episode_return=earned, success=False)
    counts = count_group(replace(make_group(1), rollouts=(drawn,)))
    assert (counts.num_wins, counts.num_draws, counts.num_losses) == (0, 1, 0)


def test_episodes_of_an_environment_that_says_nothing_are_not_judged() -> None:
    silent = [replace(r, success=None) for r in make_group(200, 17, 9).rollouts]
    counts = count_group(replace(make_group(1, 1, 1), rollouts=tuple(silent)))
    assert (counts.num_judged, counts.num_wins, counts.num_terminated) == (0, 0, 3)


def test_terms_are_summed_by_name_and_unscored_ones_left_out() -> None:
    group = make_group(1, -1)
    terms = [
        (ScoredTerm("format", 0.5), ScoredTerm("style", None)),
        (ScoredTerm("format", 0.25), ScoredTerm("style", 2.0)),
    ]
    rollouts = [replace(r, terms=t) for r, t in zip(group.rollouts, terms, strict=True)]
    counts = count_group(replace(group, rollouts=tuple(rollouts)))
    assert counts.terms == {"format": TermSum(2, 0.75), "style": TermSum(1, 2.0)}
    assert total([counts, counts, RolloutCounts()]).terms["format"] == TermSum(4, 1.5)

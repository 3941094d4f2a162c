"""A run learns from true rewards and does not learn from shuffled rewards.

The two runs differ only in their rewards. Both train the blackjack example on 41,000 games. The
measure is the share of the gap between random play and basic strategy that a run closes on the
same deals.

Shuffled rewards still change the policy at random, so it may stand more or less often. However,
shuffled rewards cannot teach the policy to use its hand. The threshold between learning and drift
is therefore the share that always standing closes, the best result of a policy that ignores its
hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.runs import Summary
from tests.e2e.runs import start_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(2400),
    pytest.mark.usefixtures("shared_ray"),
]

SETTINGS = (
    "training.num_steps=40",
    "training.groups_per_step=256",
    "rollout.num_groups_in_flight=512",
    "learner.num_minibatches=4",
    "learner.warmup_steps=3",
    "eval.num_games=4000",
    "eval.num_games_during=2000",
    "eval.every_steps=40",
    'environment.baselines=["random", "always_stand", "basic_strategy"]',
    "environment.random_policy=random",
    "environment.optimal_policy=basic_strategy",
)


def train_blackjack(folder: Path, *overrides: str) -> Summary:
    """Train the blackjack example with these overrides; return its summary."""
    with start_run(folder, *SETTINGS, *overrides) as run:
        return run.finish(timeout_s=2300)


def compute_always_stand_gap_share(summary: Summary) -> float:
    """Return the share of the gap that always standing closes on the same deals."""
    returns = {name: result.expected_return for name, result in summary.baselines.items()}
    gap = returns["basic_strategy"] - returns["random"]
    return (returns["always_stand"] - returns["random"]) / gap


def test_policy_learns_from_rewards(tmp_path: Path) -> None:
    summary = train_blackjack(tmp_path)
    assert summary.start is not None and summary.gap_closed_ci95 is not None
    assert summary.start.win_rate < 0.36, "the first policy is better than random"
    assert summary.gap_closed_ci95[0] > compute_always_stand_gap_share(summary)


def test_policy_does_not_learn_from_shuffled_rewards(tmp_path: Path) -> None:
    summary = train_blackjack(tmp_path, "training.shuffle_rewards=true")
    assert summary.gap_closed_ci95 is not None
    assert summary.gap_closed_ci95[0] < compute_always_stand_gap_share(summary)

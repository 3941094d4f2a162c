"""It learns; and what must not learn does not.

Both runs are the same but for the rewards: dealt as earned, or dealt out at random.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.runs import Summary
from tests.e2e.runs import start_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = (
    "environment.options.game=catch",
    "environment.policies=null",
    "environment.probes=null",
    "training.num_steps=30",
    "eval.num_games=1000",
)
RANDOM_WIN_RATE = 0.202
"""Of a random player at catch."""


def learn(folder: Path, *overrides: str) -> Summary:
    """The summary of a run at catch."""
    with start_run(folder, *SETTINGS, *overrides) as run:
        return run.finish(timeout_s=250)


def test_a_policy_learns_from_its_rewards(tmp_path: Path) -> None:
    summary = learn(tmp_path)
    assert summary.start is not None
    assert summary.start.win_rate_ci95[1] < 0.4, "it begins near a random player"
    assert summary.win_rate_ci95[0] > 0.5, "the whole interval is well above one"


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    summary = learn(tmp_path, "training.shuffle_rewards=true")
    assert summary.win_rate_ci95[0] < RANDOM_WIN_RATE + 0.1

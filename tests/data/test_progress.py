"""A run that gets nowhere ends, and says why; one that is only held up continues."""

from __future__ import annotations

import pytest

from ludus.proto.config import RunConfig
from ludus.proto.errors import TrainingStalledError, UnavailableError
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.progress import Progress

VOID = RolloutCounts(num_groups=1, num_episodes=4, num_lost=4, num_void_groups=1)
SCORED = RolloutCounts(num_groups=1, num_episodes=4, num_scored=4)
DEAD = RolloutCounts(num_groups=1, num_episodes=4, num_scored=4, num_zero_variance_groups=1)


def make_progress() -> Progress:
    """Of a run with two environments, whose servers may be away for 30 s, and batches of 2."""
    away = {"reconnect_timeout_s": 30}
    return Progress(
        RunConfig.model_validate(
            {"environments": {"a": away, "b": away}, "training": {"groups_per_step": 2}}
        )
    )


def test_an_environment_that_comes_back_in_time_only_delays() -> None:
    progress = make_progress()
    progress.observe({"a": VOID}, 0.0, taken=False)
    progress.observe({"a": VOID + VOID}, 29.0, taken=False)
    progress.observe({"a": VOID + VOID + SCORED}, 31.0, taken=False)
    progress.observe({"a": VOID + VOID + SCORED + VOID}, 40.0, taken=False)
    progress.observe({"a": VOID + VOID + SCORED + VOID + VOID}, 69.0, taken=False)


def test_an_environment_that_stays_away_ends_the_run_with_its_name() -> None:
    progress = make_progress()
    progress.observe({"a": VOID, "b": SCORED}, 0.0, taken=True)
    progress.observe({"a": VOID, "b": SCORED}, 20.0, taken=True)
    with pytest.raises(UnavailableError, match=r"'a'.*30 s.*reconnect_timeout_s = 30"):
        progress.observe({"a": VOID, "b": SCORED}, 30.0, taken=True)


def test_nothing_new_from_an_environment_says_nothing_about_it() -> None:
    progress = make_progress()
    progress.observe({"a": VOID}, 0.0, taken=False)
    progress.observe({"a": VOID}, 100.0, taken=False)


def test_replacing_zero_variance_groups_without_end_ends_the_run() -> None:
    progress = make_progress()
    counts = RolloutCounts()
    for number in range(199):
        counts += DEAD
        progress.observe({"a": counts}, float(number), taken=False)
    with pytest.raises(TrainingStalledError, match="200 groups had equal rewards"):
        progress.observe({"a": counts + DEAD}, 200.0, taken=False)


def test_a_batch_at_last_is_progress() -> None:
    progress = make_progress()
    many = RolloutCounts(num_groups=500, num_zero_variance_groups=498, num_scored=2000)
    progress.observe({"a": many}, 0.0, taken=True)

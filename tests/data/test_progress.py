"""A run that gets nowhere ends, and says why; one that is only held up continues."""

from __future__ import annotations

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import EpisodesFailedError, TrainingStalledError, UnavailableError
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.failures import count_failures
from ludus.trainer.data.progress import Progress

VOID = RolloutCounts(
    num_groups=1,
    num_episodes=4,
    num_lost=4,
    num_void_groups=1,
    failures=count_failures(["UnavailableError: no answer"] * 4),
)
FAILED = RolloutCounts(
    num_groups=1,
    num_episodes=4,
    num_failed=4,
    num_void_groups=1,
    failures=count_failures(["KeyError: 'answer'"] * 3 + ["ValueError: 7"]),
)
SCORED = RolloutCounts(num_groups=1, num_episodes=4, num_scored=4)
DEAD = RolloutCounts(num_groups=1, num_episodes=4, num_scored=4, num_zero_variance_groups=1)


def make_progress() -> Progress:
    """Of a run with two environments, whose servers may be away for 30 s, and batches of 2."""
    away = {"reconnect_timeout_s": 30}
    return Progress(
        LanguageModelRun.model_validate(
            {
                "environments": {"a": away, "b": away},
                "training": {"groups_per_step": 2},
                "rollout": {"group_size": 4},
            }
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
    with pytest.raises(UnavailableError, match=r"'a'.*30 s.*no answer.*reconnect_timeout_s = 30"):
        progress.observe({"a": VOID, "b": SCORED}, 30.0, taken=True)


def test_an_environment_that_has_never_worked_ends_the_run_after_two_batches() -> None:
    progress = make_progress()
    counts = FAILED + FAILED
    progress.observe({"a": counts, "b": SCORED}, 0.0, taken=False)
    counts += FAILED
    progress.observe({"a": counts, "b": SCORED}, 20.0, taken=False)
    with pytest.raises(EpisodesFailedError, match=r"'a'.*first 16 episodes.*KeyError: 'answer'"):
        progress.observe({"a": counts + FAILED, "b": SCORED}, 20.1, taken=False)


def test_a_burst_of_failures_before_anything_was_scored_is_waited_out() -> None:
    progress = make_progress()
    counts = RolloutCounts()
    for second in range(9):
        counts += FAILED + FAILED
        progress.observe({"a": counts}, float(second), taken=False)
    counts += SCORED + FAILED
    progress.observe({"a": counts}, 10.0, taken=False)
    progress.observe({"a": counts + FAILED}, 20.0, taken=False)


def test_an_environment_that_has_worked_may_fail_for_as_long_as_it_may_stay_away() -> None:
    progress = make_progress()
    counts = SCORED
    progress.observe({"a": counts}, 0.0, taken=False)
    for second in range(1, 31):
        counts += FAILED
        progress.observe({"a": counts}, float(second), taken=False)
    with pytest.raises(EpisodesFailedError, match=r"'a'.*KeyError: 'answer'"):
        progress.observe({"a": counts + FAILED}, 31.0, taken=False)


def test_a_good_group_among_many_void_ones_does_not_keep_a_run_alive() -> None:
    progress = make_progress()
    counts = SCORED
    progress.observe({"a": counts}, 0.0, taken=False)
    for second in range(1, 31):
        counts += FAILED + FAILED + FAILED
        if second == 15:
            counts += SCORED
        progress.observe({"a": counts}, float(second), taken=False)
    with pytest.raises(EpisodesFailedError):
        progress.observe({"a": counts + FAILED}, 31.0, taken=False)


def test_an_environment_that_works_again_is_not_ended_for_what_was_before() -> None:
    progress = make_progress()
    counts = SCORED
    progress.observe({"a": counts}, 0.0, taken=False)
    for _ in range(500):
        counts += FAILED
    progress.observe({"a": counts}, 1.0, taken=False)
    for second in range(28, 60):
        counts += SCORED + SCORED + FAILED
        progress.observe({"a": counts}, float(second), taken=False)


def test_one_group_in_fifty_that_fails_says_nothing() -> None:
    progress = make_progress()
    counts = RolloutCounts()
    for second in range(1000):
        counts += SCORED if second % 50 else FAILED
        progress.observe({"a": counts}, float(second), taken=False)


def test_a_wait_for_groups_that_do_not_end_is_told_each_minute_and_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    training = {"groups_per_step": 2, "idle_timeout_s": 600}
    run = LanguageModelRun.model_validate({"environments": {"a": {}}, "training": training})
    progress = Progress(run, lambda: "2 groups are being played")
    progress.observe({"a": SCORED + SCORED}, 0.0, taken=True)
    for second in range(1000, 1100):  # the step was trained meanwhile
        progress.observe({}, float(second), taken=False)
    for second in range(1100, 1600):
        progress.observe({"a": SCORED}, float(second), taken=False)
    told = [record.message for record in caplog.records]
    assert len(told) == 9
    assert told[0] == (
        "waiting for a batch of 2 groups, 60 s so far; 0 have ended since the last batch, the "
        "newest 60 s ago; 2 groups are being played"
    )
    assert "1 have ended since the last batch, the newest 80 s ago" in told[2]
    progress.observe({"a": SCORED + SCORED}, 1650.0, taken=False)
    progress.observe({"a": SCORED + SCORED}, 2249.0, taken=False)
    with pytest.raises(TrainingStalledError, match=r"ended for 600 s.*idle_timeout_s = 600.*2 gro"):
        progress.observe({"a": SCORED + SCORED}, 2250.0, taken=False)


def test_each_new_kind_of_reason_is_logged_once_and_few_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    progress = make_progress()
    progress.observe({"a": SCORED + FAILED}, 0.0, taken=True)
    progress.observe({"a": FAILED}, 1.0, taken=True)
    assert sorted(record.message for record in caplog.records) == [
        "an episode of environment 'a' is void: KeyError: 'answer'",
        "an episode of environment 'a' is void: ValueError: 7",
    ]
    for number in range(100):
        word = "".join(chr(97 + int(digit)) for digit in str(number))
        more = RolloutCounts(num_groups=1, failures=count_failures([f"ValueError: {word}"]))
        progress.observe({"a": more}, 2.0, taken=True)
    assert len(caplog.records) == 21


def test_groups_that_a_reward_term_leaves_without_a_reward_are_named_as_such() -> None:
    progress = make_progress()
    unscored = RolloutCounts(num_groups=1, num_episodes=4, num_void_groups=1)
    progress.observe({"a": unscored}, 0.0, taken=False)
    with pytest.raises(EpisodesFailedError, match="a term of the reward is None"):
        progress.observe({"a": unscored + unscored}, 30.0, taken=False)


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

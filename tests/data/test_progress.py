"""A run without progress stops with the reason; a delayed run continues."""

from __future__ import annotations

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import EpisodesFailedError, TrainingStalledError, UnavailableError
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.failures import count_failures
from ludus.trainer.data.progress import ProgressMonitor

VOID_COUNTS = RolloutCounts(
    num_groups=1,
    num_episodes=4,
    num_lost=4,
    num_void_groups=1,
    failures=count_failures(["UnavailableError: no answer"] * 4),
)
FAILED_COUNTS = RolloutCounts(
    num_groups=1,
    num_episodes=4,
    num_failed=4,
    num_void_groups=1,
    failures=count_failures(["KeyError: 'answer'"] * 3 + ["ValueError: 7"]),
)
SCORED_COUNTS = RolloutCounts(num_groups=1, num_episodes=4, num_scored=4)
ZERO_VARIANCE_COUNTS = RolloutCounts(
    num_groups=1, num_episodes=4, num_scored=4, num_zero_variance_groups=1
)


def make_monitor_run(**sections: object) -> LanguageModelRun:
    """Return a run with two environments that may be unavailable for 30 s."""
    settings = {"reconnect_timeout_s": 30}
    return LanguageModelRun.model_validate(
        {
            "environments": {"a": settings, "b": settings},
            "training": {"groups_per_step": 2},
            "rollout": {"group_size": 4},
            **sections,
        }
    )


def make_monitor() -> ProgressMonitor:
    """Return the monitor of that run."""
    return ProgressMonitor(make_monitor_run())


def test_environment_that_recovers_in_time_does_not_stop_the_run() -> None:
    monitor = make_monitor()
    monitor.observe({"a": VOID_COUNTS}, 0.0, is_taken=False)
    monitor.observe({"a": VOID_COUNTS + VOID_COUNTS}, 29.0, is_taken=False)
    monitor.observe({"a": VOID_COUNTS + VOID_COUNTS + SCORED_COUNTS}, 31.0, is_taken=False)
    monitor.observe(
        {"a": VOID_COUNTS + VOID_COUNTS + SCORED_COUNTS + VOID_COUNTS}, 40.0, is_taken=False
    )
    monitor.observe(
        {"a": VOID_COUNTS + VOID_COUNTS + SCORED_COUNTS + VOID_COUNTS + VOID_COUNTS},
        69.0,
        is_taken=False,
    )


def test_unavailable_environment_stops_the_run() -> None:
    monitor = make_monitor()
    monitor.observe({"a": VOID_COUNTS, "b": SCORED_COUNTS}, 0.0, is_taken=True)
    monitor.observe({"a": VOID_COUNTS, "b": SCORED_COUNTS}, 20.0, is_taken=True)
    with pytest.raises(UnavailableError, match=r"'a'.*30 s.*no answer.*reconnect_timeout_s = 30"):
        monitor.observe({"a": VOID_COUNTS, "b": SCORED_COUNTS}, 30.0, is_taken=True)


def test_initially_failing_environment_stops_run_after_two_batches() -> None:
    monitor = make_monitor()
    counts = FAILED_COUNTS + FAILED_COUNTS
    monitor.observe({"a": counts, "b": SCORED_COUNTS}, 0.0, is_taken=False)
    counts += FAILED_COUNTS
    monitor.observe({"a": counts, "b": SCORED_COUNTS}, 20.0, is_taken=False)
    with pytest.raises(EpisodesFailedError, match=r"'a'.*first 16 episodes.*KeyError: 'answer'"):
        monitor.observe({"a": counts + FAILED_COUNTS, "b": SCORED_COUNTS}, 20.1, is_taken=False)


def test_short_burst_of_initial_failures_does_not_stop_the_run() -> None:
    monitor = make_monitor()
    counts = RolloutCounts()
    for second in range(9):
        counts += FAILED_COUNTS + FAILED_COUNTS
        monitor.observe({"a": counts}, float(second), is_taken=False)
    counts += SCORED_COUNTS + FAILED_COUNTS
    monitor.observe({"a": counts}, 10.0, is_taken=False)
    monitor.observe({"a": counts + FAILED_COUNTS}, 20.0, is_taken=False)


def test_working_environment_may_fail_for_reconnect_timeout() -> None:
    monitor = make_monitor()
    counts = SCORED_COUNTS
    monitor.observe({"a": counts}, 0.0, is_taken=False)
    for second in range(1, 31):
        counts += FAILED_COUNTS
        monitor.observe({"a": counts}, float(second), is_taken=False)
    with pytest.raises(EpisodesFailedError, match=r"'a'.*KeyError: 'answer'"):
        monitor.observe({"a": counts + FAILED_COUNTS}, 31.0, is_taken=False)


def test_run_stops_despite_one_scored_group_among_many_void_groups() -> None:
    monitor = make_monitor()
    counts = SCORED_COUNTS
    monitor.observe({"a": counts}, 0.0, is_taken=False)
    for second in range(1, 31):
        counts += FAILED_COUNTS + FAILED_COUNTS + FAILED_COUNTS
        if second == 15:
            counts += SCORED_COUNTS
        monitor.observe({"a": counts}, float(second), is_taken=False)
    with pytest.raises(EpisodesFailedError):
        monitor.observe({"a": counts + FAILED_COUNTS}, 31.0, is_taken=False)


def test_recovered_environment_does_not_stop_the_run() -> None:
    monitor = make_monitor()
    counts = SCORED_COUNTS
    monitor.observe({"a": counts}, 0.0, is_taken=False)
    for _ in range(500):
        counts += FAILED_COUNTS
    monitor.observe({"a": counts}, 1.0, is_taken=False)
    for second in range(28, 60):
        counts += SCORED_COUNTS + SCORED_COUNTS + FAILED_COUNTS
        monitor.observe({"a": counts}, float(second), is_taken=False)


def test_rare_failures_do_not_stop_the_run() -> None:
    monitor = make_monitor()
    counts = RolloutCounts()
    for second in range(1000):
        counts += SCORED_COUNTS if second % 50 else FAILED_COUNTS
        monitor.observe({"a": counts}, float(second), is_taken=False)


def test_idle_wait_is_logged_each_minute_and_stops_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    training = {"groups_per_step": 2, "idle_timeout_s": 600}
    run = LanguageModelRun.model_validate({"environments": {"a": {}}, "training": training})
    monitor = ProgressMonitor(run, lambda: "2 groups are being played")
    monitor.observe({"a": SCORED_COUNTS + SCORED_COUNTS}, 0.0, is_taken=True)
    for second in range(1000, 1100):  # a training step is running
        monitor.observe({}, float(second), is_taken=False)
    for second in range(1100, 1600):
        monitor.observe({"a": SCORED_COUNTS}, float(second), is_taken=False)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 9
    assert messages[0] == (
        "waiting for a batch of 2 groups for 60 s; 0 have finished since the last batch (0 were "
        "replaced because of equal rewards), the latest 60 s ago; 2 groups are being played"
    )
    assert "because of equal rewards), the latest 80 s ago" in messages[2]
    monitor.observe({"a": SCORED_COUNTS + SCORED_COUNTS}, 1650.0, is_taken=False)
    monitor.observe({"a": SCORED_COUNTS + SCORED_COUNTS}, 2249.0, is_taken=False)
    with pytest.raises(
        TrainingStalledError, match=r"finished for 600 s.*idle_timeout_s = 600.*2 gro"
    ):
        monitor.observe({"a": SCORED_COUNTS + SCORED_COUNTS}, 2250.0, is_taken=False)


def test_each_failure_kind_is_logged_once_up_to_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = make_monitor()
    monitor.observe({"a": SCORED_COUNTS + FAILED_COUNTS}, 0.0, is_taken=True)
    monitor.observe({"a": FAILED_COUNTS}, 1.0, is_taken=True)
    assert sorted(record.message for record in caplog.records) == [
        "an episode of environment 'a' is void: KeyError: 'answer'",
        "an episode of environment 'a' is void: ValueError: 7",
    ]
    for number in range(100):
        word = "".join(chr(97 + int(digit)) for digit in str(number))
        counts = RolloutCounts(num_groups=1, failures=count_failures([f"ValueError: {word}"]))
        monitor.observe({"a": counts}, 2.0, is_taken=True)
    assert len(caplog.records) == 21


def test_unscored_groups_stop_the_run_with_missing_reward_as_reason() -> None:
    monitor = make_monitor()
    unscored_counts = RolloutCounts(num_groups=1, num_episodes=4, num_void_groups=1)
    monitor.observe({"a": unscored_counts}, 0.0, is_taken=False)
    with pytest.raises(EpisodesFailedError, match="a term of the reward is None"):
        monitor.observe({"a": unscored_counts + unscored_counts}, 30.0, is_taken=False)


def test_environment_without_new_groups_does_not_stop_the_run() -> None:
    monitor = make_monitor()
    monitor.observe({"a": VOID_COUNTS}, 0.0, is_taken=False)
    monitor.observe({"a": VOID_COUNTS}, 100.0, is_taken=False)


def test_endless_zero_variance_groups_stop_the_run() -> None:
    monitor = make_monitor()
    counts = RolloutCounts()
    for number in range(199):
        counts += ZERO_VARIANCE_COUNTS
        monitor.observe({"a": counts}, float(number), is_taken=False)
    with pytest.raises(TrainingStalledError, match="200 groups had equal rewards"):
        monitor.observe({"a": counts + ZERO_VARIANCE_COUNTS}, 200.0, is_taken=False)


def test_taking_a_batch_resets_the_limits() -> None:
    monitor = make_monitor()
    batch_counts = RolloutCounts(num_groups=500, num_zero_variance_groups=498, num_scored=2000)
    monitor.observe({"a": batch_counts}, 0.0, is_taken=True)


def test_steps_without_variance_stop_the_run_across_steps() -> None:
    monitor = make_monitor()
    step_counts = {"a": RolloutCounts(num_groups=6, num_scored=24, num_zero_variance_groups=6)}
    for number in range(33):
        monitor.observe(step_counts, float(number), is_taken=True, has_variance=False)
    resumed_monitor = ProgressMonitor(
        make_monitor_run(), num_zero_variance_groups=monitor.num_zero_variance_groups
    )
    with pytest.raises(TrainingStalledError, match="204 groups had equal rewards"):
        resumed_monitor.observe(step_counts, 40.0, is_taken=True, has_variance=False)
    monitor.observe(step_counts, 41.0, is_taken=True, has_variance=True)
    assert monitor.num_zero_variance_groups == 0


def test_steps_without_variance_do_not_stop_a_run_that_keeps_such_groups() -> None:
    run = make_monitor_run(algorithm={"zero_variance_groups": "keep"})
    monitor = ProgressMonitor(run)
    step_counts = {"a": RolloutCounts(num_groups=6, num_scored=24, num_zero_variance_groups=6)}
    for number in range(100):
        monitor.observe(step_counts, float(number), is_taken=True, has_variance=False)

"""Comparison of normal blackjack runs with runs in which episodes and workers fail.

There are three runs of each kind, with seeds 0, 1 and 2. In the disturbed runs, 1 % of the episodes
raise an error (`raising_environment`). One of the two rollout workers loads wrong weights, and the
engine of the other fails (`disturbed_run`). The disturbed runs must recover, train on no failed
episode, and learn as well as the normal runs. The settings were chosen with other seeds. The
numbers are written to bench/results/chaos-quality.json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import pytest

from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import Summary
from tests.chaos.disturbed_run import (
    ENGINE_FAILURE_STEP,
    ENGINE_FAILURE_WORKER,
    WRONG_WEIGHTS_STEP,
    WRONG_WEIGHTS_WORKER,
)
from tests.chaos.faults import count_episodes, read_log
from tests.chaos.raising_environment import FAILURE_INTERVAL
from tests.chaos.test_long import describe_machine, select_results
from tests.e2e.runs import EXAMPLE, Run, start_run, wait_until_gone

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(7200)]

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "chaos-quality.json"
SEEDS = (0, 1, 2)
MAX_DIFFERENCE = 0.1
"""Bound on the 95 % interval of the difference in means, as a share of the gap between random play
and basic strategy."""
MIN_GAP_CLOSED = 0.8
"""Minimum share of the gap that a normal run closes. Always standing closes 0.568."""
T_QUANTILE = 2.776
"""97.5 % quantile of Student's t distribution with 4 degrees of freedom."""
SETTINGS = (
    "training.num_steps=60",
    "training.checkpoint_every_steps=30",
    "rollout.num_workers=2",
    "rollout.num_groups_in_flight=256",
    "eval.num_games_during=0",
    "eval.temperature=0",
)
RAISING_SETTING = "environment.package=tests.chaos.raising_environment:RaisingBlackjack"
DISTURBED_PROGRAM = ("tests.chaos.disturbed_run",)


def test_runs_with_faults_learn_as_well_as_normal_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TEST_RUN", str(tmp_path))
    normal_summaries, summaries = [], []
    for seed in SEEDS:
        settings = (*SETTINGS, f"seed={seed}")
        with start_run(tmp_path / f"normal-{seed}", *settings, config=EXAMPLE) as run:
            normal_summaries.append(run.finish(timeout_s=1500))
        folder = tmp_path / f"disturbed-{seed}"
        with start_run(
            folder, *settings, RAISING_SETTING, config=EXAMPLE, program=DISTURBED_PROGRAM
        ) as run:
            summaries.append(run.finish(timeout_s=1500))
        check_counts(run, summaries[-1])
        check_recovery(run, summaries[-1])
    wait_until_gone(str(tmp_path))
    min_difference, max_difference = compute_mean_difference(
        list_closed_gaps(summaries), list_closed_gaps(normal_summaries)
    )
    write_results(normal_summaries, summaries, (min_difference, max_difference))
    assert min(list_closed_gaps(normal_summaries)) > MIN_GAP_CLOSED
    for normal_summary, summary in zip(normal_summaries, summaries, strict=True):
        assert do_overlap(normal_summary.expected_return_ci95, summary.expected_return_ci95), (
            normal_summary.seed
        )
    assert -MAX_DIFFERENCE < min_difference <= 0 <= max_difference < MAX_DIFFERENCE


def check_counts(run: Run, summary: Summary) -> None:
    """Check that every episode is counted once, and that no void episode was trained on."""
    counts = count_episodes(run)
    assert counts.is_balanced(), counts
    group_size = counts.group_size
    failure_share = summary.episodes_failed / summary.games_played
    assert 0.7 / FAILURE_INTERVAL < failure_share < 1.3 / FAILURE_INTERVAL, failure_share
    assert summary.games_trained == counts.num_trained * group_size
    # Episodes of one group have the same seed and fail together. If an engine fails, finished
    # episodes of the same group are not trained on either.
    num_finished = counts.num_void * group_size - counts.num_failed - counts.num_lost
    assert 0 <= num_finished < counts.num_lost, counts
    assert "the shoe is empty" in read_log(run)


def check_recovery(run: Run, summary: Summary) -> None:
    """Check that one worker returned to rotation and that the other was replaced."""
    log = read_log(run)
    assert summary.canary_failures == 1
    removal_message = (
        f"rollout worker {WRONG_WEIGHTS_WORKER} removed from rotation: canary of weights version"
    )
    assert f"rollout worker {WRONG_WEIGHTS_WORKER} ready" in log.partition(removal_message)[2]
    [failed_worker] = re.findall(
        r"rollout worker (\d) ended \(.*MemoryError.*; starting another", log
    )
    assert int(failed_worker) == ENGINE_FAILURE_WORKER
    assert log.count("starting another") == 1, "more than one process was replaced"
    assert f"rollout worker {ENGINE_FAILURE_WORKER} ready" in log.partition("starting another")[2]
    assert summary.episodes_lost > 0, "no episode was lost with the failed engine"
    workers_by_step = {
        row.step: {weights.worker for weights in row.weights}
        for row in run.rows
        if row.kind == "weights"
    }
    assert (
        workers_by_step[ENGINE_FAILURE_STEP - 1]
        == workers_by_step[max(workers_by_step)]
        == {WRONG_WEIGHTS_WORKER, ENGINE_FAILURE_WORKER}
    )
    metric = TrainMetric.NUM_CANARY_FAILURES
    [canary_event] = [row for row in run.rows if row.kind == "event" and metric in row.values]
    assert WRONG_WEIGHTS_STEP <= canary_event.step < ENGINE_FAILURE_STEP


def list_closed_gaps(summaries: Sequence[Summary]) -> list[float]:
    """Return the share of the gap that each run closed."""
    gaps = [summary.gap_closed for summary in summaries]
    assert None not in gaps
    return [gap for gap in gaps if gap is not None]


def compute_mean_difference(
    disturbed_gaps: Sequence[float], normal_gaps: Sequence[float]
) -> tuple[float, float]:
    """Return the 95 % interval of the difference in means of two samples of equal size."""
    pooled_variance = (variance(disturbed_gaps) + variance(normal_gaps)) / 2
    half_width = T_QUANTILE * math.sqrt(2 * pooled_variance / len(disturbed_gaps))
    difference = fmean(disturbed_gaps) - fmean(normal_gaps)
    return difference - half_width, difference + half_width


def do_overlap(interval: tuple[float, float], other_interval: tuple[float, float]) -> bool:
    return interval[0] <= other_interval[1] and other_interval[0] <= interval[1]


def write_results(
    normal_summaries: Sequence[Summary],
    summaries: Sequence[Summary],
    difference: tuple[float, float],
) -> None:
    results: dict[str, Any] = {
        "what": "examples/blackjack/tiny.toml for 60 steps, with and without faults: 1 % of the "
        "episodes raise an error, and both workers fail; `make chaos`",
        "machine": describe_machine(),
        "versions": normal_summaries[0].versions,
        "settings": list(SETTINGS),
        "seeds": list(SEEDS),
        "faults": [
            {"fault": f"1 of {FAILURE_INTERVAL} seeds raises", "step": 0},
            {
                "fault": f"worker {WRONG_WEIGHTS_WORKER} loads wrong weights once",
                "step": WRONG_WEIGHTS_STEP,
            },
            {
                "fault": f"worker {ENGINE_FAILURE_WORKER}'s engine fails permanently",
                "step": ENGINE_FAILURE_STEP,
            },
        ],
        "alone": [select_results(summary) for summary in normal_summaries],
        "disturbed": [select_results(summary) for summary in summaries],
        "difference_of_mean_gap_closed_ci95": list(difference),
        "margin": MAX_DIFFERENCE,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")

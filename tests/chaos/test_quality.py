"""Blackjack runs in which episodes raise and workers break, beside undisturbed ones.

Three runs of each kind, with the seeds 0, 1 and 2. In the disturbed ones 1 % of the episodes raise
(`raising_environment`), and of two rollout workers one loads weights wrongly and one loses its
engine (`disturbed_run`). What is shown: the run mends itself, trains on no episode that failed,
and has learned as much. The settings were chosen with other seeds.
The numbers go to bench/results/chaos-quality.json.
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
from tests.chaos.disturbed_run import BREACH_AT, BREACHING, LOSING, LOSS_AT
from tests.chaos.faults import account_of, log_of
from tests.chaos.raising_environment import ONE_IN
from tests.chaos.test_long import machine, numbers_of
from tests.e2e.runs import EXAMPLE, Run, start_run, wait_until_gone

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(7200)]

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "chaos-quality.json"
SEEDS = (0, 1, 2)
MARGIN = 0.1
"""Of the gap between random play and basic strategy, by which the means of the two kinds may
differ, whole 95 % interval of the difference included."""
LEAST_LEARNED = 0.8
"""Of the gap: more than always standing closes (0.568), so there is something to lose."""
T_975 = 2.776
"""Student's t with the four degrees of freedom of two samples of three."""
SETTINGS = (
    "training.num_steps=60",
    "training.checkpoint_every_steps=30",
    "rollout.num_workers=2",
    "rollout.num_groups_in_flight=256",
    "eval.num_games_during=0",
    "eval.temperature=0",
)
RAISING = "environment.package=tests.chaos.raising_environment:RaisingBlackjack"
DISTURBED = ("tests.chaos.disturbed_run",)


def test_a_run_whose_episodes_raise_and_whose_workers_break_learns_as_much_as_one_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TEST_RUN", str(tmp_path))
    alone, disturbed = [], []
    for seed in SEEDS:
        settings = (*SETTINGS, f"seed={seed}")
        with start_run(tmp_path / f"alone-{seed}", *settings, config=EXAMPLE) as run:
            alone.append(run.finish(timeout_s=1500))
        folder = tmp_path / f"disturbed-{seed}"
        with start_run(folder, *settings, RAISING, config=EXAMPLE, program=DISTURBED) as run:
            disturbed.append(run.finish(timeout_s=1500))
        check_account(run, disturbed[-1])
        check_mends(run, disturbed[-1])
    wait_until_gone(str(tmp_path))
    low, high = difference_of_means(gaps_closed(disturbed), gaps_closed(alone))
    record(alone, disturbed, (low, high))
    assert min(gaps_closed(alone)) > LEAST_LEARNED
    for one, other in zip(alone, disturbed, strict=True):
        assert overlap(one.expected_return_ci95, other.expected_return_ci95), one.seed
    assert -MARGIN < low <= 0 <= high < MARGIN, (low, high)


def check_account(run: Run, summary: Summary) -> None:
    """Every episode went to one place, and none that failed or was lost into training."""
    account = account_of(run)
    assert account.is_balanced(), account
    size = account.group_size
    share = summary.episodes_failed / summary.games_played
    assert 0.7 / ONE_IN < share < 1.3 / ONE_IN, share
    assert summary.games_trained == account.num_trained * size
    # Episodes of one group have one seed and fail together; where an engine was lost, others of
    # the group may have ended well before, and are not trained on either.
    num_spared = account.num_void * size - account.num_failed - account.num_lost
    assert 0 <= num_spared < account.num_lost, account
    assert "the shoe is empty" in log_of(run)


def check_mends(run: Run, summary: Summary) -> None:
    """One worker was out of traffic until it held the right weights, one was replaced."""
    log = log_of(run)
    assert summary.canary_failures == 1
    out_of_traffic = f"rollout worker {BREACHING} is out of traffic: canary of weights version"
    assert f"rollout worker {BREACHING} is ready" in log.partition(out_of_traffic)[2]
    [ended] = re.findall(r"rollout worker (\d) ended \(.*MemoryError.*; starting another", log)
    assert int(ended) == LOSING
    assert log.count("starting another") == 1, "no other process was replaced"
    assert f"rollout worker {LOSING} is ready" in log.partition("starting another")[2]
    assert summary.episodes_lost > 0, "what was played with that engine"
    held = {
        row.step: {one.worker for one in row.weights} for row in run.rows if row.kind == "weights"
    }
    assert held[LOSS_AT - 1] == held[max(held)] == {BREACHING, LOSING}
    failures = TrainMetric.NUM_CANARY_FAILURES
    [breach] = [row for row in run.rows if row.kind == "event" and failures in row.values]
    assert BREACH_AT <= breach.step < LOSS_AT


def gaps_closed(summaries: Sequence[Summary]) -> list[float]:
    """Of each run, from random play to basic strategy."""
    gaps = [summary.gap_closed for summary in summaries]
    assert None not in gaps
    return [gap for gap in gaps if gap is not None]


def difference_of_means(some: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of some minus that of others, of as many runs."""
    pooled = (variance(some) + variance(others)) / 2
    half = T_975 * math.sqrt(2 * pooled / len(some))
    middle = fmean(some) - fmean(others)
    return middle - half, middle + half


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether the intervals have anything in common."""
    return one[0] <= other[1] and other[0] <= one[1]


def record(
    alone: Sequence[Summary], disturbed: Sequence[Summary], difference: tuple[float, float]
) -> None:
    """Write the numbers."""
    result: dict[str, Any] = {
        "what": "examples/blackjack/tiny.toml in 60 steps, 1 % of whose episodes raise and both "
        "of whose workers break, and left alone; `make chaos`",
        "machine": machine(),
        "versions": alone[0].versions,
        "settings": list(SETTINGS),
        "seeds": list(SEEDS),
        "faults": [
            {"fault": f"1 of {ONE_IN} seeds raises", "step": 0},
            {"fault": f"worker {BREACHING} loads weights wrongly once", "step": BREACH_AT},
            {"fault": f"worker {LOSING}'s engine fails for good", "step": LOSS_AT},
        ],
        "alone": [numbers_of(summary) for summary in alone],
        "disturbed": [numbers_of(summary) for summary in disturbed],
        "difference_of_mean_gap_closed_ci95": list(difference),
        "margin": MARGIN,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")

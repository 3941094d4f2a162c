"""Comparison of the autoscaler simulation, dev/autoscaler.py, with a recording of a cluster."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from autoscaler import Autoscaler, Fleet, JsonObject
from autoscaling_picture import RECORDED_SYNC_S, TARGET, Recording, draw

from tests.charts.promtool import run_promtool
from tests.charts.rendering import ValueSet, merge_values, render
from tests.charts.value_sets import MONITORED_VALUES, merge_environment

CLUSTER = Path(__file__).parents[1] / "cluster"
RECORDED_DATA: Any = json.loads((CLUSTER / "autoscaling.json").read_text())
RECORDING = Recording.parse(RECORDED_DATA)
TOLERANCE_S = 15
"""Allowed delay in seconds: two HPA cycles, one poll and one scrape, each at its maximum delay."""
MIN_AGREEMENT = 0.95
"""Minimum share of seconds in which the simulation and the recording agree.

The two gateways are scraped at different times. A session that moves between them can be counted
twice, so the real autoscaler briefly adds one or two pods.
"""
MAX_EXTRA_PODS = 2


def render_scaled_object(value_set: ValueSet) -> JsonObject:
    """Return the specification of the ScaledObject that the chart renders."""
    return render(value_set).find("ScaledObject")["spec"]  # type: ignore[no-any-return]


RECORDED_VALUES = ValueSet(
    "autoscaling-recorded",
    yaml.safe_load((CLUSTER / "autoscaling.yaml").read_text()),
    file="values-cpu.yaml",
    namespace=RECORDED_DATA["namespace"],
)
KEDA_SETTINGS = {"kind": "keda", "min": 0, "max": 16}
SHIPPED_VALUES = ValueSet(
    "keda-shipped", merge_values(merge_environment(autoscaling=KEDA_SETTINGS), MONITORED_VALUES)
)


def count_reversals(replicas: list[int]) -> int:
    """Count how often the number of replicas switches between rising and falling."""
    changes = [end - start for start, end in itertools.pairwise(replicas) if start != end]
    return sum(
        (change > 0) != (next_change > 0) for change, next_change in itertools.pairwise(changes)
    )


@pytest.mark.slow
def test_chart_settings_match_the_recorded_run() -> None:
    recorded_spec = RECORDED_DATA["scaled_object"]
    assert merge_values(recorded_spec, render_scaled_object(RECORDED_VALUES)) == recorded_spec


@pytest.mark.slow
@pytest.mark.parametrize("phase_s", range(RECORDED_SYNC_S))
def test_simulation_matches_the_recorded_run(phase_s: int) -> None:
    real_replicas = [int(count) for count in RECORDING.seconds["replicas"]]
    simulated_replicas = RECORDING.simulate(render_scaled_object(RECORDED_VALUES), phase_s)
    matches = []
    for time_s, count in enumerate(simulated_replicas):
        nearby_replicas = real_replicas[max(0, time_s - TOLERANCE_S) : time_s + TOLERANCE_S + 1]
        matches.append(min(nearby_replicas) <= count <= max(nearby_replicas))
    assert sum(matches) / len(matches) >= MIN_AGREEMENT
    assert max(simulated_replicas) <= max(real_replicas) <= max(simulated_replicas) + MAX_EXTRA_PODS
    assert (simulated_replicas[-1], count_reversals(simulated_replicas)) == (
        real_replicas[-1],
        count_reversals(real_replicas),
    )


def test_docs_picture_of_the_recorded_run_is_up_to_date() -> None:
    assert TARGET.read_text(encoding="utf-8") == draw(RECORDING)


@pytest.mark.slow
def test_waiting_open_requests_a_pod_within_ten_seconds() -> None:
    release = render(SHIPPED_VALUES)
    scaled_object = release.find("ScaledObject")["spec"]
    endpoint = release.find("ServiceMonitor")["spec"]["endpoints"][0]
    assert (endpoint["interval"], scaled_object["pollingInterval"]) == ("5s", 5)
    trigger = scaled_object["triggers"][0]["metadata"]
    assert float(trigger["activationThreshold"]) == 0, "one waiting open starts the first pod"
    behavior = scaled_object["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleUp"]
    assert behavior["stabilizationWindowSeconds"] == 0
    assert {"type": "Percent", "value": 100, "periodSeconds": 15} in behavior["policies"]


@pytest.mark.slow
def test_missed_scrape_does_not_drop_the_queue(tmp_path: Path) -> None:
    labels = 'namespace="arena",release="ludus",env="blackjack"'
    series = {
        # Both gateways report the same sessions on servers; each has a separate queue.
        f'ludus_gateway_sessions{{{labels},pod="a",state="active"}}': "8 8 8 8 8 8 8 8",
        f'ludus_gateway_sessions{{{labels},pod="b",state="active"}}': "8 8 8 8 8 8 8 8",
        f'ludus_gateway_sessions{{{labels},pod="a",state="pending"}}': "0 0 0 0 0 0 0 0",
        f'ludus_gateway_sessions{{{labels},pod="b",state="pending"}}': "28 28 stale _ stale _ 5 5",
        f'ludus_gateway_sessions{{{labels},pod="b",state="draining"}}': "9 9 9 9 9 9 9 9",
    }
    query = render_scaled_object(SHIPPED_VALUES)["triggers"][0]["metadata"]["query"]
    expected = {"0s": 36, "30s": 36, "45s": 36, "105s": 13}
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": time, "exp_samples": [{"labels": "{}", "value": value}]}
            for time, value in expected.items()
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}))
    run_promtool("test", "rules", path)


@pytest.mark.slow
def test_pods_are_added_immediately_and_removed_after_the_run() -> None:
    players = [0] * 60 + [2048] * 1940 + [0] * 300 + [2048] * 1700 + [0] * 1000
    replicas = make_shipped_fleet(session_s=8).run(players)
    assert replicas[120] == 11 == math.ceil(2048 / 192)
    assert set(replicas[120:4500]) == {11}
    assert replicas[-1] == 0
    assert count_reversals(replicas) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_small_load_changes_do_not_change_the_number_of_pods(seed: int) -> None:
    rng = random.Random(seed)
    players = [round(rng.uniform(850, 950)) for _ in range(2000)]
    assert set(make_shipped_fleet(session_s=30).run(players)) == {5}


@pytest.mark.slow
def test_window_shorter_than_sessions_removes_pods_in_use() -> None:
    """Sessions on draining pods are not counted until clients open them again on other pods."""
    pods_by_window = {}
    for window_s in (60, 600):
        fleet = make_shipped_fleet(session_s=500)
        behavior = fleet.scaler.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        behavior["scaleDown"]["stabilizationWindowSeconds"] = window_s
        pods_by_window[window_s] = fleet.run([1640] * 1000 + [1000] * 1500)
    assert (min(pods_by_window[600]), count_reversals(pods_by_window[600])) == (6, 0)
    assert (min(pods_by_window[60]), count_reversals(pods_by_window[60])) == (2, 1)


def make_shipped_fleet(session_s: int) -> Fleet:
    """Return a fleet with the chart's default settings and initially no pods."""
    scaler = Autoscaler(copy.deepcopy(render_scaled_object(SHIPPED_VALUES)), 0)
    return Fleet(scaler, capacity=256, start_s=20, session_s=session_s)

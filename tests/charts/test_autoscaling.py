"""The autoscaler of dev/autoscaler.py, with the settings that the chart renders: against
a run on a real cluster, and over loads that a run has."""

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
from autoscaler import Autoscaler, Fleet, Object
from autoscaling_picture import RECORDED_SYNC_S, TARGET, Recording, draw

from tests.charts.promtool import promtool
from tests.charts.rendering import ValueSet, over, rendered
from tests.charts.value_sets import MONITORED, with_environment

CLUSTER = Path(__file__).parents[1] / "cluster"
SAID: Any = json.loads((CLUSTER / "autoscaling.json").read_text())
RECORDED = Recording.parse(SAID)
TOLERANCE_S = 15
"""Two looks of the HPA, a poll and a scrape, on a machine that is late with each."""
SHARE = 0.95
"""Of the seconds. Two gateways that are scraped at different moments count a session that is given
its place in between twice, so the real one adds a pod or two for a moment."""
MORE_PODS = 2


def scaled_object(chosen: ValueSet) -> Object:
    """What the chart tells KEDA."""
    return rendered(chosen).one("ScaledObject")["spec"]  # type: ignore[no-any-return]


RECORDED_VALUES = ValueSet(
    "autoscaling-recorded",
    yaml.safe_load((CLUSTER / "autoscaling.yaml").read_text()),
    file="values-cpu.yaml",
    namespace=SAID["namespace"],
)
KEDA = {"kind": "keda", "min": 0, "max": 16}
SHIPPED = ValueSet("keda-shipped", over(with_environment(autoscaling=KEDA), MONITORED))


def turns(replicas: list[int]) -> int:
    """How often they began to fall after they rose, or to rise after they fell."""
    changes = [b - a for a, b in itertools.pairwise(replicas) if a != b]
    return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(changes))


def test_the_recorded_run_had_the_settings_that_the_chart_renders() -> None:
    recorded = SAID["scaled_object"]
    assert over(recorded, scaled_object(RECORDED_VALUES)) == recorded


@pytest.mark.parametrize("phase_s", range(RECORDED_SYNC_S))
def test_it_does_what_the_real_one_did(phase_s: int) -> None:
    real = [int(number) for number in RECORDED.seconds["replicas"]]
    simulated = RECORDED.simulate(scaled_object(RECORDED_VALUES), phase_s)
    near = []
    for at_s, number in enumerate(simulated):
        around = real[max(0, at_s - TOLERANCE_S) : at_s + TOLERANCE_S + 1]
        near.append(min(around) <= number <= max(around))
    assert sum(near) / len(near) >= SHARE
    assert max(simulated) <= max(real) <= max(simulated) + MORE_PODS
    assert (simulated[-1], turns(simulated)) == (real[-1], turns(real))


def test_the_picture_of_the_recorded_run_is_the_one_in_the_docs() -> None:
    assert TARGET.read_text(encoding="utf-8") == draw(RECORDED)


@pytest.mark.slow
def test_a_gateway_that_one_scrape_misses_keeps_its_queue(tmp_path: Path) -> None:
    labels = 'namespace="arena",release="ludus",env="blackjack"'
    series = {
        # Sessions on servers are the same for both; each has a queue of its own.
        f'ludus_gateway_sessions{{{labels},pod="a",state="active"}}': "8 8 8 8 8 8 8 8",
        f'ludus_gateway_sessions{{{labels},pod="b",state="active"}}': "8 8 8 8 8 8 8 8",
        f'ludus_gateway_sessions{{{labels},pod="a",state="pending"}}': "0 0 0 0 0 0 0 0",
        f'ludus_gateway_sessions{{{labels},pod="b",state="pending"}}': "28 28 stale _ stale _ 5 5",
        f'ludus_gateway_sessions{{{labels},pod="b",state="draining"}}': "9 9 9 9 9 9 9 9",
    }
    query = scaled_object(SHIPPED)["triggers"][0]["metadata"]["query"]
    expected = {"0s": 36, "30s": 36, "45s": 36, "105s": 13}
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": at, "exp_samples": [{"labels": "{}", "value": value}]}
            for at, value in expected.items()
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}))
    promtool("test", "rules", path)


def test_a_run_gets_its_pods_at_once_keeps_them_through_a_pause_and_gives_them_back() -> None:
    players = [0] * 60 + [2048] * 1940 + [0] * 300 + [2048] * 1700 + [0] * 1000
    replicas = shipped_fleet(session_s=8).run(players)
    assert replicas[120] == 11 == math.ceil(2048 / 192)
    assert set(replicas[120:4500]) == {11}
    assert replicas[-1] == 0
    assert turns(replicas) == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_load_that_wavers_moves_no_pod(seed: int) -> None:
    draw = random.Random(seed)
    players = [round(draw.uniform(850, 950)) for _ in range(2000)]
    assert set(shipped_fleet(session_s=30).run(players)) == {5}


def test_a_window_shorter_than_sessions_takes_pods_that_are_needed() -> None:
    """Sessions on pods that drain are not counted until they are opened anew elsewhere."""
    pods = {}
    for window_s in (60, 600):
        fleet = shipped_fleet(session_s=500)
        behavior = fleet.scaler.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        behavior["scaleDown"]["stabilizationWindowSeconds"] = window_s
        pods[window_s] = fleet.run([1640] * 1000 + [1000] * 1500)
    assert (min(pods[600]), turns(pods[600])) == (6, 0)
    assert (min(pods[60]), turns(pods[60])) == (2, 1)


def shipped_fleet(session_s: int) -> Fleet:
    """Pods as the chart has them unless it is told otherwise, none at first."""
    scaler = Autoscaler(copy.deepcopy(scaled_object(SHIPPED)), 0)
    return Fleet(scaler, capacity=256, start_s=20, session_s=session_s)

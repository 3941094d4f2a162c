"""The chart's Prometheus rules with shorter durations: one hour becomes two minutes.

Windows, delays and thresholds in units of time are divided by 30. Other thresholds are unchanged.
tests/charts/test_rules.py tests the original durations.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tests.cluster.installed import CHART, Release, kubectl

SPEEDUP = 30
SCRAPE_INTERVAL = "2s"
"""Interval of scrapes and rule evaluations. The shortest window (5 min / 30) has five intervals."""
_SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600}
_WINDOW_PATTERN = re.compile(r"(\[|offset )(\d+)([smh])")
_DURATION_S_PATTERN = re.compile(r"(?<=[<>] )(\d{3,})\b")


def apply_faster_rules(release: Release) -> None:
    """Create a PrometheusRule with the shortened rules in the release's namespace."""
    groups = [
        speed_up_group(group)
        for path in sorted((CHART / "rules").glob("*.yaml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    ]
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "faster", "namespace": release.namespace},
        "spec": {"groups": groups},
    }
    kubectl("create", "-f", "-", stdin=json.dumps(manifest))


def speed_up_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return the rule group with all durations divided by SPEEDUP."""
    return group | {
        "interval": SCRAPE_INTERVAL,
        "rules": [_speed_up_rule(rule) for rule in group["rules"]],
    }


def _speed_up_rule(rule: dict[str, Any]) -> dict[str, Any]:
    expression = _WINDOW_PATTERN.sub(
        lambda match: f"{match[1]}{_shorten_duration(match[2], match[3])}", rule["expr"]
    )
    expression = _DURATION_S_PATTERN.sub(lambda match: str(int(match[1]) // SPEEDUP), expression)
    durations = {
        key: _shorten_duration(rule[key][:-1], rule[key][-1]) for key in rule if key.endswith("for")
    }
    return rule | durations | {"expr": expression}


def _shorten_duration(amount: str, unit: str) -> str:
    return f"{int(amount) * _SECONDS_PER_UNIT[unit] // SPEEDUP}s"

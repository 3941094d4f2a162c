"""The chart's rules by a clock that runs faster: what takes an hour takes two minutes.

Windows, delays and thresholds that are spans of time become a thirtieth; thresholds of another
kind stay. Their real lengths are tested minute by minute in tests/charts/test_rules.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tests.cluster.installed import CHART, Installed, kubectl

TIMES_FASTER = 30
INTERVAL = "2s"
"""Of scrapes and evaluations: the shortest window, 5 min, is five of them."""
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_WINDOW = re.compile(r"(\[|offset )(\d+)([smh])")
_SPAN_S = re.compile(r"(?<=[<>] )(\d{3,})\b")


def apply_faster_rules(release: Installed) -> None:
    """Create a PrometheusRule of the release's namespace with all records and alerts."""
    groups = [
        faster(group)
        for path in sorted((CHART / "rules").glob("*.yaml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    ]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "faster", "namespace": release.namespace},
        "spec": {"groups": groups},
    }
    kubectl("create", "-f", "-", given=json.dumps(rule))


def faster(group: dict[str, Any]) -> dict[str, Any]:
    """A group whose time runs faster."""
    return group | {"interval": INTERVAL, "rules": [_rule(rule) for rule in group["rules"]]}


def _rule(rule: dict[str, Any]) -> dict[str, Any]:
    expr = _WINDOW.sub(lambda found: f"{found[1]}{_shorter(found[2], found[3])}", rule["expr"])
    expr = _SPAN_S.sub(lambda found: str(int(found[1]) // TIMES_FASTER), expr)
    spans = {key: _shorter(rule[key][:-1], rule[key][-1]) for key in rule if key.endswith("for")}
    return rule | spans | {"expr": expr}


def _shorter(amount: str, unit: str) -> str:
    return f"{int(amount) * _SECONDS[unit] // TIMES_FASTER}s"

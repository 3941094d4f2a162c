"""Tests that the chart's dashboards are up to date, well-formed and use exported metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboards import DASHBOARDS, TARGET, find_stale_files
from grafana.model import Dashboard

from ludus.proto.metrics import EnvServerMetric
from tests.charts.exported import list_exported_names
from tests.charts.promql import fill_variables, read_metric_names
from tests.charts.promtool import run_promtool

MAX_BYTES = 150_000
"""Maximum size of a dashboard. A release stores each dashboard twice and has at most 1 MiB."""
MAX_UID_CHARS = 40
PANEL_TYPES = {"timeseries", "stat", "heatmap", "state-timeline", "table"}
UNITS = {"none", "short", "percentunit", "percent", "s", "bytes", "sci"}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
VARIABLE_VALUES = {
    "namespace": ".*",
    "run": "mixed",
    "environment": ".*",
    "window": "5m",
    "__rate_interval": "1m",
}
Json = dict[str, Any]

DASHBOARD_FILES = sorted(TARGET.glob("*.json"))


@pytest.fixture(params=DASHBOARD_FILES, ids=lambda path: path.stem)
def board(request: pytest.FixtureRequest) -> Json:
    """Return a committed dashboard."""
    path: Path = request.param
    return json.loads(path.read_text(encoding="utf-8"))


def iterate_panels(board: Json) -> Iterator[Json]:
    """Yield all panels except headings."""
    yield from (panel for panel in board["panels"] if panel["type"] != "row")


def test_committed_files_are_up_to_date() -> None:
    assert find_stale_files() == [], "run .venv/bin/python dev/dashboards.py"
    assert len(DASHBOARD_FILES) == len(DASHBOARDS) >= 4


def test_every_dashboard_has_a_unique_uid_and_no_database_id() -> None:
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARD_FILES]
    uids = [board["uid"] for board in boards]
    assert len(set(uids)) == len(uids)
    assert [path.stem for path in DASHBOARD_FILES] == uids
    assert all(len(uid) <= MAX_UID_CHARS for uid in uids)
    assert not any("id" in board for board in boards)
    assert all(board["tags"] == ["ludus"] for board in boards)
    assert not any(board["editable"] for board in boards)


@pytest.mark.parametrize("path", DASHBOARD_FILES, ids=lambda path: path.stem)
def test_dashboard_file_is_below_the_size_limit(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES


def test_panels_have_unique_ids_and_do_not_overlap(board: Json) -> None:
    all_panels = board["panels"]
    panel_ids = [panel["id"] for panel in all_panels]
    assert len(set(panel_ids)) == len(panel_ids)
    for panel in all_panels:
        position = panel["gridPos"]
        assert position["x"] >= 0 and position["x"] + position["w"] <= 24, panel["title"]
    for panel, next_panel in combinations(all_panels, 2):
        assert not do_overlap(panel["gridPos"], next_panel["gridPos"]), (
            panel["title"],
            next_panel["title"],
        )


def do_overlap(position: Json, other_position: Json) -> bool:
    has_horizontal_gap = (
        position["x"] + position["w"] <= other_position["x"]
        or other_position["x"] + other_position["w"] <= position["x"]
    )
    has_vertical_gap = (
        position["y"] + position["h"] <= other_position["y"]
        or other_position["y"] + other_position["h"] <= position["y"]
    )
    return not (has_horizontal_gap or has_vertical_gap)


def test_every_panel_has_a_description_and_a_unit(board: Json) -> None:
    for panel in iterate_panels(board):
        assert panel["type"] in PANEL_TYPES, panel["title"]
        assert panel["datasource"] == DATASOURCE
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or unit.startswith("suffix: "), (panel["title"], unit)


def test_every_series_has_a_name(board: Json) -> None:
    for panel in iterate_panels(board):
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE
            assert target["legendFormat"], panel["title"]
        if panel["type"] == "timeseries":
            assert panel["options"]["legend"]["showLegend"]
        ref_ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ref_ids)) == len(ref_ids)


def test_dashboard_variables_are_complete_and_query_the_datasource(board: Json) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    names = list(variables)
    assert names[:2] == ["datasource", "namespace"]
    assert "environment" in names
    assert "run" in names or board["uid"] == "ludus-fleet"
    assert variables["datasource"]["query"] == "prometheus"
    for variable in variables.values():
        assert variable["description"].endswith(".")
        if variable["type"] == "query":
            assert variable["datasource"] == DATASOURCE
            assert variable["refresh"] == 2


def test_repeated_panel_title_contains_the_variable(board: Json) -> None:
    for panel in iterate_panels(board):
        if "repeat" in panel:
            assert f"${panel['repeat']}" in panel["title"]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_every_expression_is_valid_promql(dashboard: Dashboard, tmp_path: Path) -> None:
    declared_names = {variable.name for variable in dashboard.variables} | {"__rate_interval"}
    values = {name: value for name, value in VARIABLE_VALUES.items() if name in declared_names}
    rules = [
        {"record": f"dashboard:expression_{number}", "expr": fill_variables(query.expr, values)}
        for number, query in enumerate(dashboard.queries)
    ]
    path = tmp_path / "expressions.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run_promtool("check", "rules", path)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_every_metric_is_exported(dashboard: Dashboard) -> None:
    for query in dashboard.queries:
        names = read_metric_names(query.expr)
        assert names, query.expr
        assert names <= list_exported_names(), query.expr


def test_metric_names_are_read_from_an_expression() -> None:
    expression = (
        "sum by (run, x) (rate(a_total{b=~\"c|{d}\", e='f'}[5m])) / on (run) group_left (g)"
        " (max by (run) (h:i:j) > 0) * 1.96e3 or vector(0) and k offset 5m"
    )
    assert read_metric_names(expression) == {"a_total", "h:i:j", "k"}
    assert f"{EnvServerMetric.STEPS}_total" in list_exported_names()
    assert EnvServerMetric.STEPS not in list_exported_names()
    with pytest.raises(ValueError, match=r"\$nothing is not a variable"):
        fill_variables("up{x='$nothing'}", VARIABLE_VALUES)

"""Each alert fires only for its condition; no alert fires on a healthy platform."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboards import TARGET

from tests.charts.exported import list_exported_names
from tests.charts.promql import read_metric_names
from tests.charts.promtool import run_promtool
from tests.charts.scenarios import HARMLESS_CHANGES, HEALTHY_SERIES, SCENARIOS, Scenario

ROOT = Path(__file__).parents[2]
RULE_FILES = sorted((TARGET.parent / "rules").glob("*.yaml"))
SEVERITIES = {"critical", "warning", "info"}
HEALTHY_MINUTES = 180
_LABEL_PATTERN = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
_VALUE_PATTERN = re.compile(r"\{\{ \$value[^}]*\}\}")
_RECORD_PATTERN = re.compile(r"ludus:[a-z_]+:[a-z0-9_]+")
Json = dict[str, Any]

RULE_GROUPS: list[Json] = [
    group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]
]
RECORDING_RULES: dict[str, Json] = {
    rule["record"]: rule for group in RULE_GROUPS for rule in group["rules"] if "record" in rule
}
ALERTS: dict[str, Json] = {
    rule["alert"]: rule for group in RULE_GROUPS for rule in group["rules"] if "alert" in rule
}


def test_rules_are_well_formed() -> None:
    output = run_promtool("check", "rules", *RULE_FILES)
    rule_counts = [int(count) for count in re.findall(r"(\d+) rules found", output)]
    assert (
        sum(rule_counts)
        == len(RECORDING_RULES) + len(ALERTS)
        == sum(len(group["rules"]) for group in RULE_GROUPS)
    )


def test_every_metric_is_exported_or_recorded() -> None:
    for name, rule in (RECORDING_RULES | ALERTS).items():
        names = read_metric_names(rule["expr"])
        names |= set(re.findall(r"ludus_train_\w+", rule["expr"]))
        assert names <= list_exported_names() | set(RECORDING_RULES), name


def test_recording_rule_names_have_level_metric_and_operation() -> None:
    for name in RECORDING_RULES:
        assert _RECORD_PATTERN.fullmatch(name)


def test_every_alert_has_a_severity_and_a_documentation_link() -> None:
    for name, alert in ALERTS.items():
        assert name.startswith("Ludus")
        assert alert["labels"] == {"severity": alert["labels"]["severity"]}
        assert alert["labels"]["severity"] in SEVERITIES
        # An intermittent condition must cause one alert, not many.
        assert {"for", "keep_firing_for"} <= set(alert), name
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["description"].endswith("."), name
        assert not alert["annotations"]["summary"].endswith("."), name
        page = ROOT / alert["annotations"]["runbook_url"]
        assert page == ROOT / "docs" / "runbooks" / f"{name}.md"


def test_every_alert_has_a_runbook() -> None:
    folder = ROOT / "docs" / "runbooks"
    pages = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("Ludus*.md")}
    assert set(pages) == set(ALERTS)
    index = (folder / "README.md").read_text(encoding="utf-8")
    for name, text in pages.items():
        headings = re.findall(r"^#+ .*$", text, re.MULTILINE)
        assert headings == [f"# {name}", "## Meaning", "## Diagnosis", "## Remedy"], name
        assert f"[{name}]({name}.md) | {ALERTS[name]['labels']['severity']} |" in index


def test_every_alert_has_a_scenario() -> None:
    assert {scenario.alert for scenario in SCENARIOS} == set(ALERTS)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.alert)
def test_scenario_triggers_only_the_expected_alert(scenario: Scenario, tmp_path: Path) -> None:
    alert = ALERTS[scenario.alert]
    firing_alert = {
        "exp_labels": {**scenario.labels, **alert["labels"]},
        "exp_annotations": {
            key: fill_labels(text, scenario) for key, text in alert["annotations"].items()
        },
    }
    cases = [
        _make_case(name, scenario.minute, [firing_alert] if name == scenario.alert else [])
        for name in ALERTS
    ]
    cases.append(_make_case(scenario.alert, scenario.silent_minute, []))
    check_rules(tmp_path, scenario.changes, cases, minutes=90)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, *HARMLESS_CHANGES.values()], ids=["healthy", *HARMLESS_CHANGES]
)
def test_harmless_changes_trigger_no_alert(changes: Mapping[str, str], tmp_path: Path) -> None:
    check_rules(
        tmp_path,
        changes,
        [_make_fired_case(HEALTHY_MINUTES, "")],
        HEALTHY_MINUTES,
        "promql_expr_test",
    )


@pytest.mark.slow
def test_brief_earlier_alert_is_detected(tmp_path: Path) -> None:
    (brief_scenario,) = (
        scenario for scenario in SCENARIOS if scenario.alert == "LudusCanaryFailed"
    )
    case = _make_fired_case(HEALTHY_MINUTES, '{alertname="LudusCanaryFailed"}')
    check_rules(tmp_path, brief_scenario.changes, [case], HEALTHY_MINUTES, "promql_expr_test")


@pytest.mark.slow
def test_recording_rules_produce_the_expected_values(tmp_path: Path) -> None:
    expected = {
        "ludus:run_win_rate:ratio_increase5m": 0.4,
        "ludus:run_draw_rate:ratio_increase5m": 0.1,
        "ludus:run_loss_rate:ratio_increase5m": 0.5,
        "ludus:env_saturation:ratio": 0.5,
        "ludus:run_step_seconds:mean": 60,
    }
    cases = [
        {
            "expr": f"sum({name})",
            "eval_time": "30m",
            "exp_samples": [{"labels": "{}", "value": value}],
        }
        for name, value in expected.items()
    ]
    check_rules(tmp_path, {}, cases, 30, kind="promql_expr_test")


def fill_labels(text: str, scenario: Scenario) -> str:
    """Return an annotation with the scenario's labels and value; fail for unknown labels."""
    text = _LABEL_PATTERN.sub(lambda match: scenario.labels[match[1]], text)
    assert scenario.value or "$value" not in text
    return _VALUE_PATTERN.sub(scenario.value, text)


def check_rules(
    folder: Path,
    changes: Mapping[str, str],
    cases: Iterable[Json],
    minutes: int,
    kind: str = "alert_rule_test",
) -> None:
    """Evaluate the rules every minute and check the cases with promtool."""
    values = {
        name: text.replace("xN", f"x{minutes}") for name, text in (HEALTHY_SERIES | changes).items()
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in values.items()],
        kind: list(cases),
    }
    path = folder / "test.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(path) for path in RULE_FILES],
                "evaluation_interval": "1m",
                # Recording rules come before the rules that use them.
                "group_eval_order": [group["name"] for group in RULE_GROUPS],
                "tests": [test],
            }
        )
    )
    run_promtool("test", "rules", path)


def _make_fired_case(minutes: int, labels: str) -> Json:
    expression = f'group by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{minutes}m]))'
    samples = [{"labels": labels, "value": 1}] if labels else []
    return {"expr": expression, "eval_time": f"{minutes}m", "exp_samples": samples}


def _make_case(alert: str, minute: int, alerts: list[Json]) -> Json:
    return {"alertname": alert, "eval_time": f"{minute}m", "exp_alerts": alerts}

"""Each alert fires only for its condition; no alert fires on a healthy platform."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboards import TARGET

from tests.charts.exported import exported_names
from tests.charts.promql import read_metric_names
from tests.charts.promtool import promtool
from tests.charts.scenarios import CLEAN, HARMLESS, SCENARIOS, Scenario

ROOT = Path(__file__).parents[2]
RULES = sorted((TARGET.parent / "rules").glob("*.yaml"))
SEVERITIES = {"critical", "warning", "info"}
CLEAN_MINUTES = 180
_LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
_VALUE = re.compile(r"\{\{ \$value[^}]*\}\}")
_RECORD = re.compile(r"ludus:[a-z_]+:[a-z0-9_]+")
Json = dict[str, Any]

GROUPS: list[Json] = [
    group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]
]
RECORDS: dict[str, Json] = {
    rule["record"]: rule for group in GROUPS for rule in group["rules"] if "record" in rule
}
ALERTS: dict[str, Json] = {
    rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule
}


def test_the_rules_are_well_formed() -> None:
    output = promtool("check", "rules", *RULES)
    num_rules = [int(number) for number in re.findall(r"(\d+) rules found", output)]
    assert sum(num_rules) == len(RECORDS) + len(ALERTS) == sum(len(g["rules"]) for g in GROUPS)


def test_every_metric_is_exported_or_recorded() -> None:
    for name, rule in (RECORDS | ALERTS).items():
        names = read_metric_names(rule["expr"])
        names |= set(re.findall(r"ludus_train_\w+", rule["expr"]))
        assert names <= exported_names() | set(RECORDS), name


def test_every_record_has_a_name_of_level_metric_and_operation() -> None:
    for name in RECORDS:
        assert _RECORD.fullmatch(name)


def test_every_alert_has_a_severity_and_a_documentation_link() -> None:
    for name, alert in ALERTS.items():
        assert name.startswith("Ludus")
        assert alert["labels"] == {"severity": alert["labels"]["severity"]}
        assert alert["labels"]["severity"] in SEVERITIES
        # An intermittent condition is one alert, not many.
        assert {"for", "keep_firing_for"} <= set(alert), name
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["description"].endswith("."), name
        assert not alert["annotations"]["summary"].endswith("."), name
        page = ROOT / alert["annotations"]["runbook_url"]
        assert page == ROOT / "docs" / "runbooks" / f"{name}.md"


def test_every_alert_has_a_page_with_remedies() -> None:
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
def test_the_condition_makes_the_alert_fire_and_no_other(
    scenario: Scenario, tmp_path: Path
) -> None:
    alert = ALERTS[scenario.alert]
    fires = {
        "exp_labels": {**scenario.labels, **alert["labels"]},
        "exp_annotations": {
            key: fill_labels(text, scenario) for key, text in alert["annotations"].items()
        },
    }
    cases = [
        _case(name, scenario.minute, [fires] if name == scenario.alert else []) for name in ALERTS
    ]
    cases.append(_case(scenario.alert, scenario.silent_minute, []))
    run(tmp_path, scenario.changes, cases, minutes=90)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, *HARMLESS.values()], ids=["clean", *HARMLESS])
def test_harmless_changes_cause_no_alert(changes: Mapping[str, str], tmp_path: Path) -> None:
    run(tmp_path, changes, [_fired_within(CLEAN_MINUTES, "")], CLEAN_MINUTES, "promql_expr_test")


@pytest.mark.slow
def test_any_earlier_alert_is_detected(tmp_path: Path) -> None:
    (brief,) = (scenario for scenario in SCENARIOS if scenario.alert == "LudusCanaryFailed")
    case = _fired_within(CLEAN_MINUTES, '{alertname="LudusCanaryFailed"}')
    run(tmp_path, brief.changes, [case], CLEAN_MINUTES, "promql_expr_test")


@pytest.mark.slow
def test_shares_are_recorded(tmp_path: Path) -> None:
    expected = {
        "ludus:run_win_rate:ratio_increase5m": 0.4,
        "ludus:run_draw_rate:ratio_increase5m": 0.1,
        "ludus:run_loss_rate:ratio_increase5m": 0.5,
        "ludus:env_saturation:ratio": 0.5,
        "ludus:run_step_seconds:mean": 60,
    }
    cases = [
        {"expr": f"sum({name})", "eval_time": "30m", "exp_samples": [{"labels": "{}", "value": v}]}
        for name, v in expected.items()
    ]
    run(tmp_path, {}, cases, 30, kind="promql_expr_test")


def fill_labels(text: str, scenario: Scenario) -> str:
    """Fill labels into an annotation; a label that the alert does not have is an error."""
    text = _LABEL.sub(lambda match: scenario.labels[match[1]], text)
    assert scenario.value or "$value" not in text
    return _VALUE.sub(scenario.value, text)


def run(
    folder: Path,
    changes: Mapping[str, str],
    cases: Iterable[Json],
    minutes: int,
    kind: str = "alert_rule_test",
) -> None:
    """Evaluate the rules every minute, and check the cases."""
    values = {name: text.replace("xN", f"x{minutes}") for name, text in (CLEAN | changes).items()}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in values.items()],
        kind: list(cases),
    }
    path = folder / "test.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(path) for path in RULES],
                "evaluation_interval": "1m",
                # In the order of the files: recording rules come before their readers.
                "group_eval_order": [group["name"] for group in GROUPS],
                "tests": [test],
            }
        )
    )
    promtool("test", "rules", path)


def _fired_within(minutes: int, labels: str) -> Json:
    fired = f'group by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{minutes}m]))'
    samples = [{"labels": labels, "value": 1}] if labels else []
    return {"expr": fired, "eval_time": f"{minutes}m", "exp_samples": samples}


def _case(alert: str, minute: int, fires: list[Json]) -> Json:
    return {"alertname": alert, "eval_time": f"{minute}m", "exp_alerts": fires}

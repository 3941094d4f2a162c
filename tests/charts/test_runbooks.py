"""Consistency of docs/runbooks with the rules, the dashboards, the chart and the configuration."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from dashboards import TARGET
from pydantic import BaseModel

from ludus.proto.config import LanguageModelRun
from ludus.proto.config.load import load_run_config
from ludus.proto.config.mistakes import find_sections
from ludus.proto.config.training_run import TrainingSection
from ludus.proto.errors import ErrorCode
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import LOG_FILE, Phase
from ludus.services.cli.app import app
from ludus.services.gateway.tenancy.access import AuthFailure
from ludus.services.gateway.tenancy.metrics import OpenOutcome
from ludus.trainer.run.schedule import CheckpointSchedule
from tests.charts.exported import list_exported_names
from tests.charts.promql import read_metric_names
from tests.charts.promtool import run_promtool
from tests.charts.test_rules import ALERTS, RECORDING_RULES, SEVERITIES

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ludus"
EXAMPLE = ROOT / "examples" / "blackjack" / "tiny.toml"
PAGES = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs/runbooks").glob("*.md")}
INDEX = PAGES["README"]
NUMBERS = {
    **{"one": 1, "two": 2, "three": 3, "five": 5, "ten": 10, "twelve": 12, "twenty": 20},
    **{"half an": 0.5, "a quarter of an": 0.25, "an": 1},
}
SECONDS = {"s": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}
FOREIGN_WORDS = {
    *("/runs/RUN/checkpoints/step-N", "step-", "RUN-network", "RUN@best"),
    *("Evicted", "ImagePullBackOff", "OOMKilled", "ValidationFailed", "context deadline exceeded"),
    *("ActionParseError", "EnvError", "IndexError", "None", "ValueError"),
    *("parse", "render", "reset", "step", "ray status", LOG_FILE),
    *("ENV", "NAMESPACE", "POD", "RUN"),
}
"""Words of Kubernetes, Ray and Python, paths and placeholders."""
FIELD_PREFIXES = ("", "algorithm.", "environments.", "weights.", "weights.canary.")
"""Sections whose fields the pages also name without the section."""


def join_lines(text: str) -> str:
    return " ".join(text.split())


def find_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def find_code_words() -> set[str]:
    """Return the texts in backquotes on all pages."""
    texts = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in PAGES.values()]
    return {word for text in texts for word in re.findall(r"`([^`]+)`", join_lines(text))}


def list_fields(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields, and of the sections."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for child in find_sections(field.annotation):
            yield from list_fields(child, f"{prefix}{name}.")


def list_values(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all values of the chart."""
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from list_values(value, f"{prefix}{name}.")


VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
CHART_NAMES = {*list_values(VALUES), *list_values(VALUES["environmentDefaults"])}
RUN_FIELDS = set(list_fields(LanguageModelRun))


def is_setting(name: str) -> bool:
    """Return whether there is such a chart value, or such a field or section of a run."""
    is_field = any(f"{prefix}{name}" in RUN_FIELDS for prefix in FIELD_PREFIXES)
    return name in CHART_NAMES or name == "environment" or is_field


def is_choice(name: str) -> bool:
    """Return whether the word is a value that the code uses."""
    choices = {*Phase, *OpenOutcome, *AuthFailure, *ErrorCode, *TrainMetric, *SEVERITIES}
    return name in choices or name in {"sequence_mask", "icepop"}


def test_every_word_in_code_style_exists() -> None:
    unknown_words = {
        word
        for word in find_code_words() - FOREIGN_WORDS
        if not word.startswith(("ludus ", "kubectl ", "helm "))
        and "=" not in word
        and not is_setting(word)
        and not is_choice(word)
    }
    assert unknown_words == set()


def find_assignments() -> list[str]:
    return sorted(word for word in find_code_words() if " = " in word)


@pytest.mark.parametrize("assignment", find_assignments())
def test_settings_of_runs_are_valid(assignment: str) -> None:
    name, _, value = assignment.partition(" = ")
    prefixes = {"resume": "environment.", "zero_variance_groups": "algorithm."}
    path = f"{prefixes.get(name, '')}{name}"
    run = load_run_config(EXAMPLE, [f"{path}={value}"])
    assert isinstance(run, LanguageModelRun)
    field: Any = run
    for part in path.split("."):
        field = getattr(field, part)
    assert field == json.loads(value)


@pytest.mark.parametrize("kind", ["sequence_mask", "icepop"])
def test_corrections_are_valid(kind: str) -> None:
    run = load_run_config(EXAMPLE, [f"algorithm.correction.kind={kind}"])
    assert isinstance(run, LanguageModelRun) and run.algorithm.correction.kind == kind


def find_commands() -> list[str]:
    return sorted(word for word in find_code_words() if word.startswith("ludus "))


@pytest.mark.parametrize("command_line", find_commands())
def test_commands_and_their_options_exist(command_line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(command_line)[1:]
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options


@pytest.mark.parametrize("name", PAGES)
def test_queries_use_exported_metrics(name: str) -> None:
    for expression in find_blocks(PAGES[name], "promql"):
        for line in expression.splitlines():
            names = read_metric_names(line)
            assert names and names <= list_exported_names() | set(RECORDING_RULES)


def test_queries_are_valid(tmp_path: Path) -> None:
    lines = [
        line
        for text in PAGES.values()
        for block in find_blocks(text, "promql")
        for line in block.splitlines()
    ]
    rules = [{"record": f"runbook:{index}", "expr": line} for index, line in enumerate(lines)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "runbooks", "rules": rules}]}))
    assert f"{len(lines)} rules found" in run_promtool("check", "rules", path)


def test_dashboards_rows_and_panels_exist() -> None:
    boards = [json.loads(path.read_text("utf-8")) for path in TARGET.glob("*.json")]
    titles = {board["title"].removeprefix("Ludus / ") for board in boards}
    titles |= {panel["title"] for board in boards for panel in board["panels"]}
    texts = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in PAGES.values()]
    names = {name for text in texts for name in re.findall(r"\*([^*]+)\*", join_lines(text))}
    assert names - titles == {"Targets"}, "only this page belongs to Prometheus"


def find_rule_numbers(name: str) -> set[float]:
    """Return the numbers of an alert and its recording rules: durations in seconds, thresholds."""
    rule = ALERTS[name]
    expressions = [rule["expr"]]
    for record, recording_rule in RECORDING_RULES.items():
        if record in rule["expr"]:
            expressions.append(recording_rule["expr"])
    text = " ".join([*expressions, rule["for"]])
    durations = {
        float(number) * SECONDS[unit] for number, unit in re.findall(r"\b(\d+)([smh])\b", text)
    }
    thresholds = {float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?\b", text)}
    confidences = {float(number) for number in re.findall(r"_ci(\d+)_", text)}
    shares = {round(100 * number, 6) for number in thresholds}
    return durations | thresholds | shares | confidences


def find_text_numbers(text: str) -> Iterator[float]:
    """Yield the durations, in seconds, and the percentages and shares of a text."""
    words = "|".join(NUMBERS)
    pattern = rf"\b({words}|\d+) (s|min|hours?|minutes?|seconds?)\b"
    for number, unit in re.findall(pattern, text):
        yield (NUMBERS.get(number) or float(number)) * SECONDS[unit.removesuffix("s") or "s"]
    for number in re.findall(r"(\d+) %|\(p(\d+)\)", text):
        yield float("".join(number))
    for number, base in re.findall(r"\b(one) \w+ in (a hundred|twenty)", text):
        yield 100.0 * NUMBERS[number] / (100 if base == "a hundred" else 20)


def find_meaning(name: str) -> str:
    return join_lines(PAGES[name].partition("## Meaning")[2].partition("## ")[0])


def find_condition(name: str) -> str:
    """Return the cell of the index that says when an alert fires."""
    (cell,) = re.findall(rf"\[{name}\]\({name}\.md\) \| \w+ \| (.*) \|$", INDEX, re.MULTILINE)
    return cell


OTHER_NUMBERS = {
    "LudusLearnerIdle": {3600.0},  # a rate over half an hour, for half an hour
    "LudusOpensWait": {5.0},  # the share above p95
    "LudusStepsSlow": {1.0},  # the share above p99
}
"""Numbers that the rules contain in another form."""


@pytest.mark.parametrize("name", ALERTS)
def test_numbers_of_conditions_are_those_of_the_rules(name: str) -> None:
    numbers = {*find_text_numbers(find_condition(name)), *find_text_numbers(find_meaning(name))}
    assert numbers <= find_rule_numbers(name) | OTHER_NUMBERS.get(name, set())


def test_numbers_in_texts_are_found() -> None:
    text = "one open in twenty (p95) for ten minutes, half an hour, 5 min or 3 s; one in a hundred"
    assert sorted(find_text_numbers(text)) == [3.0, 5.0, 95.0, 300.0, 600.0, 1800.0]
    assert list(find_text_numbers("one step in a hundred")) == [1.0]
    assert sum(bool(list(find_text_numbers(find_condition(name)))) for name in ALERTS) > 20


def test_lists_of_causes_are_complete() -> None:
    failures = {OpenOutcome.OPENED, OpenOutcome.RATE_LIMITED}
    assert find_causes("LudusOpensFail") == {*OpenOutcome} - failures
    assert find_causes("LudusTokensRefused") >= {*AuthFailure}
    phases = {*Phase} - {Phase.TRAIN, Phase.DONE}
    assert find_causes("LudusRunNotTraining") >= phases
    expression = RECORDING_RULES["ludus:env_calls_failed:ratio_increase10m"]["expr"]
    (codes,) = re.findall(r'code=~"([A-Z_|]+)"', expression)
    assert find_causes("LudusCallsFail") >= {*codes.split("|")}


def find_causes(name: str) -> set[str]:
    """Return the words in code style before the colons of the remedies."""
    remedies = join_lines(PAGES[name].partition("## Remedy")[2])
    heads = re.findall(r"(?:^|\s)- ([^:]*):", remedies)
    return {word for head in heads for word in re.findall(r"`([^`]+)`", head)}


def test_defaults_on_the_pages_are_those_of_the_code() -> None:
    num_kept = TrainingSection.model_fields["keep_checkpoints"].default
    assert f"`training.keep_checkpoints` checkpoints, {num_kept} by default" in join_lines(INDEX)
    delay = f"`lostNodeSeconds` later, {VALUES['lostNodeSeconds']} by default"
    assert delay in join_lines(PAGES["LudusServersUnreachable"])
    assert "about five minutes, its shortest duration" in join_lines(PAGES["LudusWeightsDiffer"])
    assert ALERTS["LudusWeightsDiffer"]["keep_firing_for"] == "5m"


def test_interval_of_checkpoints_is_twenty_times_their_duration() -> None:
    assert "at least 20 times their duration apart" in join_lines(PAGES["LudusCheckpointOld"])
    now_s = 0.0
    schedule = CheckpointSchedule(None, 1.0, clock=lambda: now_s)
    schedule.end_checkpoint(10.0)
    now_s = 199.0
    schedule.end_step()
    schedule.end_step()  # the next step takes no time
    assert not schedule.is_due(1)
    now_s = 201.0
    schedule.end_step()
    assert schedule.is_due(2)


def test_names_in_kubectl_commands_are_those_of_the_chart() -> None:
    templates = "".join(path.read_text("utf-8") for path in CHART.rglob("templates/**/*.*"))
    blocks = "".join(block for text in PAGES.values() for block in find_blocks(text, "bash"))
    for label in ("ludus.dev/environment", "app.kubernetes.io/component"):
        assert f"-l {label}=" in blocks and f"{label}: " in templates
    assert "-l ray.io/group=learner" in blocks and "groupName: learner" in templates
    assert "-c ray-head" in blocks and '"ray-head"' in templates
    assert "9000:admin" in blocks and "{name: admin, containerPort: 9000}" in templates

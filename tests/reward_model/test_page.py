"""Consistency of docs/reward-models.md with the configuration, the code and the measurement."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ludus.proto.config import RewardModelRun, RewardTerm, load_reward_model_config
from ludus.proto.config.load import load_run_config
from ludus.proto.config.reward_model import MAX_DEFAULT_WARMUP_STEPS
from ludus.proto.config.training_run import DEFAULT_CHECKPOINT_INTERVAL_S
from ludus.proto.reward_models import METRICS_FILE, TRAINING_SUFFIX
from ludus.proto.runs import LOG_FILE
from ludus.services.cli.app import app
from ludus.trainer.core.stopping import MAX_SKIPPED_UPDATES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reward-models.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "reward_model"
RUNS: list[dict[str, Any]] = json.loads(
    (ROOT / "bench" / "results" / "learn_reward.json").read_text(encoding="utf-8")
)["runs"]
ROWS = {"accuracy": "accuracy", "MRR": "mrr", "loss": "loss"}


def assert_page_contains(*statements: str) -> None:
    assert [statement for statement in statements if statement not in PAGE] == []


def read_defaults() -> Iterator[tuple[str, str]]:
    """Yield the fields of the table of fields with their defaults."""
    table = PAGE.partition("| field | default | meaning |")[2].partition("\n\n")[0]
    for names, defaults in re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.MULTILINE):
        fields = re.findall(r"`(\w+)`", names)
        texts = [text.strip("`") for text in defaults.split(", ")]
        yield from zip(fields, texts, strict=True)


def test_table_contains_every_field_with_its_default() -> None:
    fields = RewardModelRun.model_fields
    defaults = dict(read_defaults())
    assert set(defaults) == set(fields) - {"kind"}
    required_names = {name for name, text in defaults.items() if text == "required"}
    assert required_names == {name for name, field in fields.items() if field.is_required()}
    settings = {
        name: None if text == "null" else text
        for name, text in defaults.items()
        if name not in required_names
    }
    required_settings = {"model": "model", "data": "data.jsonl"}
    run = load_reward_model_config({**required_settings, **settings})
    assert run == load_reward_model_config(required_settings)


def test_limits_are_those_of_the_code() -> None:
    assert_page_contains(
        f"a tenth of the steps, at most {MAX_DEFAULT_WARMUP_STEPS}",
        f"`OUTPUT{TRAINING_SUFFIX}/{LOG_FILE}`",
        f"`OUTPUT{TRAINING_SUFFIX}/` is the run's folder",
        f"Its `{METRICS_FILE}` contains",
    )
    assert "about every two minutes" in PAGE and DEFAULT_CHECKPOINT_INTERVAL_S == 120
    assert "ten in a row end the training" in PAGE and MAX_SKIPPED_UPDATES == 10


def test_options_of_the_command_exist() -> None:
    command: Any = typer.main.get_command(app)
    parameters = command.commands["train-reward"].params
    options = {option for parameter in parameters for option in parameter.opts}
    command_lines = re.findall(r"ludus train-reward (.*)", PAGE)
    named_options = set(re.findall(r"--[a-z-]+", " ".join(command_lines)))
    named_options |= set(re.findall(r"`(--[a-z-]+)`", PAGE))
    assert len(named_options) > 4 and named_options <= options


def test_reward_term_is_valid() -> None:
    (section,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (rewards,) = re.findall(r"^rewards = (.*)$", section, re.MULTILINE)
    example = ROOT / "examples" / "summarization" / "tiny.toml"
    run = load_run_config(example, [f"environment.rewards={rewards}"])
    (term,) = run.environments["prompts"].rewards
    assert not isinstance(term, RewardTerm)
    assert (term.kind, term.path, term.weight) == ("model", "rewards/mine", 0.5)


def test_python_example_imports_what_exists() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    imports = re.findall(r"^from .*$", example, re.MULTILINE)
    imports += re.findall(r"`(from [\w.]+ import \w+)`", PAGE)
    assert len(imports) == 2
    for line in imports:
        exec(line, {})


@pytest.mark.parametrize("name", ROWS)
def test_results_are_those_of_the_measurement(name: str) -> None:
    (cells,) = re.findall(rf"^\| {name} \| [\d.]+ \| (.*) \|$", PAGE, re.MULTILINE)
    numbers = [text.split(", ") for text in cells.split(" | ")]
    measured = [
        [f"{run['values'][ROWS[name]]:.4f}" for run in RUNS if run["case"] == case]
        for case in ("preferences", "preferences_shuffled")
    ]
    assert numbers == measured


def test_times_and_sizes_are_those_of_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    training_s = max(run["training_s"] for run in RUNS)
    core_s = max(run["core_s"] for run in RUNS)
    assert_page_contains(f"at most {training_s:.0f} s on two cores", f"at most {core_s:.1f} s of")
    assert {tuple(run["num_comparisons"]) for run in RUNS} == {(1600, 400)}
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "make_preferences", raising=False)
    from make_preferences import MODEL, NUM_ANSWERS

    assert (NUM_ANSWERS, MODEL.num_layers, MODEL.width) == (4, 2, 64)
    assert_page_contains(
        "2,000 comparisons of four responses",
        "holds out 400 of them",
        "a model with two layers and width 64",
    )

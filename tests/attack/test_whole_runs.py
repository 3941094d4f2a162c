"""A whole run of an environment with rewards that overflow and texts that control a terminal."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.runs import SUMMARY_FILE, Summary
from tests.attack.attacked import make_folder, run_command
from tests.attack.test_commands import check_clean, check_clean_end

pytestmark = [pytest.mark.slow, pytest.mark.attack]

CONFIG = """
name = "hostile"

[environment]
package = "hostile_env:HostileRunEnv"

[model]
kind = "tiny"
width = 32
num_heads = 2
intermediate = 64
max_tokens = 256
warm_start_games = 64

[rollout]
group_size = 4
num_groups_in_flight = 8
max_completion_tokens = 4
max_turns = 2
max_tokens = 256

[algorithm]
zero_variance_groups = "keep"

[training]
num_steps = 3
groups_per_step = 8

[eval]
num_games = 40
num_games_during = 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("runs") / "empty")
    (folder / "run.toml").write_text(CONFIG, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def training(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_command(folder, "train", "run.toml", timeout_s=300.0)


def iterate_numbers(value: Any) -> Iterator[float]:
    """Yield all numbers of a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for element in value:
            yield from iterate_numbers(element)
    elif isinstance(value, float):
        yield value


def test_rewards_that_overflow_leave_a_readable_run(
    training: subprocess.CompletedProcess[str], folder: Path
) -> None:
    assert training.returncode == 0, training.stdout + training.stderr
    run_folder = folder / "runs" / "hostile"
    summary = Summary.model_validate_json((run_folder / SUMMARY_FILE).read_bytes())
    assert summary.num_steps == 3
    assert (run_folder / "report.html").is_file()
    for line in (run_folder / "metrics.jsonl").read_text("utf-8").splitlines():
        assert all(map(math.isfinite, iterate_numbers(json.loads(line)))), line


def test_texts_of_a_run_are_shown_clean(
    training: subprocess.CompletedProcess[str], folder: Path
) -> None:
    check_clean_end(training)
    commands = {
        "watch": ("watch", "hostile"),
        "report": ("report", "runs/hostile"),
        "eval": ("eval", "runs/hostile", "--games", "8"),
    }
    for name, arguments in commands.items():
        outcome = run_command(folder, *arguments)
        assert outcome.returncode == 0, outcome.stderr
        check_clean_end(outcome)
        if name == "watch":
            assert r"\x1b]0;EVIL" in outcome.stdout
    for file in ("trainer.log", "metrics.jsonl"):
        check_clean((folder / "runs" / "hostile" / file).read_text("utf-8"))

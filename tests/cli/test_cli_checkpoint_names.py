"""RUN@STEP, RUN@latest and RUN@best, in every command that takes a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.config import LanguageModelRun, NetworkRun, RunConfig, SftRun
from ludus.proto.runs import CHECKPOINTS_FOLDER, CONFIG_FILE, METRICS_FILE
from ludus.services.cli import trainer_process
from ludus.services.cli.branch import plan_branch, write_branch
from ludus.services.cli.run_end import list_result_lines
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow

WIN_RATES = {0: 0.9, 20: 0.5, 40: 0.7, 60: 0.6, 80: 0.65}


def make_run(
    folder: Path,
    config: RunConfig | SftRun | None = None,
    win_rates: dict[int, float] = WIN_RATES,
    steps: tuple[int, ...] = (40, 60, 80),
) -> Path:
    """Write a run with these evaluations and checkpoints; return its folder."""
    folder.mkdir(parents=True)
    for step in steps:
        (folder / CHECKPOINTS_FOLDER / f"step-{step:08d}" / "model").mkdir(parents=True)
    config = config or LanguageModelRun(name=folder.name)
    (folder / CONFIG_FILE).write_text(config.model_dump_json())
    rows = [make_row("eval", step, win_rate=rate) for step, rate in win_rates.items()]
    (folder / METRICS_FILE).write_text("".join(rows))
    return folder


def make_row(kind: str, step: int, **values: float) -> str:
    row = {"kind": kind, "step": step, "elapsed_s": 1, "num_games_trained": 1, "values": values}
    return f"{json.dumps(row)}\n"


def list_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / CHECKPOINTS_FOLDER).iterdir())


@pytest.fixture
def run_folder(ludus: RunCli, tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "demo")


@pytest.fixture
def chat_with(ludus: RunCli, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that returns the model of `ludus chat`, or its message."""
    models: list[str] = []

    def record(program: str, command: list[str]) -> None:
        models.extend(word.removeprefix("--model=") for word in command if "--model=" in word)

    monkeypatch.setattr(os, "execv", record)

    def chat(name: str) -> str:
        result = ludus("chat", name)
        return result.err if result.code else models[-1]

    return chat


@pytest.mark.parametrize(("name", "step"), [("latest", 80), ("best", 40), ("60", 60)])
def test_chat_finds_a_checkpoint_by_its_name(
    run_folder: Path, chat_with: Callable[[str], str], name: str, step: int
) -> None:
    assert chat_with(f"demo@{name}") == f"runs/demo/checkpoints/step-{step:08d}/model"


def test_a_path_with_an_at_sign_is_a_run(tmp_path: Path, chat_with: Callable[[str], str]) -> None:
    folder = make_run(tmp_path / "me@host" / "demo")
    assert chat_with(str(folder)) == str(folder)
    assert chat_with(f"{folder}@best").endswith("/demo/checkpoints/step-00000040/model")


@pytest.mark.parametrize(("name", "step"), [("latest", 80), ("best", 40), ("60", 60)])
def test_eval_passes_the_named_checkpoint_to_the_trainer(
    ludus: RunCli, run_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: int
) -> None:
    commands: list[Any] = []
    monkeypatch.setattr(
        trainer_process,
        "build_trainer_command",
        lambda arguments: commands.append(arguments) or ["false"],
    )
    ludus("eval", "runs/demo", "--checkpoint", name)
    index = commands[0].index("--checkpoint")
    assert commands[0][index + 1] == f"runs/demo/checkpoints/step-{step:08d}"
    ludus("eval", "runs/demo", "--checkpoint", "~/elsewhere")
    assert commands[1][index + 1] == os.path.expanduser("~/elsewhere")


@pytest.mark.parametrize(
    ("name", "steps"),
    [("best", [40]), ("60", [40, 60]), ("latest", [40, 80])],
)
def test_a_branch_also_gets_the_best_checkpoint_up_to_its_step(
    run_folder: Path, name: str, steps: list[int]
) -> None:
    branch = plan_branch(f"demo@{name}", ["name=other"])
    write_branch(branch)
    assert list_steps(branch.folder) == [f"step-{step:08d}" for step in steps]


def test_an_evaluation_without_checkpoint_is_left_out(
    tmp_path: Path, chat_with: Callable[[str], str]
) -> None:
    make_run(tmp_path / "runs" / "demo", steps=(60, 80))
    assert "step-00000080" in chat_with("demo@best")


@pytest.mark.parametrize(
    ("config", "win_rates", "message"),
    [
        (
            {"eval": {"num_games_during": 0}},
            {80: 0.5},
            "not evaluated during training (eval.num_games_during = 0; raise it); it has 40, 60, "
            "80, and 'latest'",
        ),
        ({}, {0: 0.5, 20: 0.1}, "none of its checkpoints was evaluated; it has 40, 60, 80"),
    ],
    ids=["off", "none"],
)
def test_a_missing_best_checkpoint_is_explained(
    tmp_path: Path,
    chat_with: Callable[[str], str],
    config: dict[str, Any],
    win_rates: dict[int, float],
    message: str,
) -> None:
    run = LanguageModelRun.model_validate({"name": "demo"} | config)
    make_run(tmp_path / "runs" / "demo", run, win_rates)
    assert message in " ".join(chat_with("demo@best").split())


@pytest.mark.parametrize("name", ["best", "latest", "20"])
def test_a_run_without_checkpoint_is_explained(
    tmp_path: Path, chat_with: Callable[[str], str], name: str
) -> None:
    make_run(tmp_path / "runs" / "demo", steps=())
    assert "no checkpoint was written yet; wait for the first one" in chat_with(f"demo@{name}")


def test_the_best_checkpoint_of_a_network_contains_no_model(
    tmp_path: Path, chat_with: Callable[[str], str]
) -> None:
    environment = {"package": "gymnasium:CartPole-v1"}
    run = NetworkRun.model_validate({"name": "demo", "environment": environment})
    folder = make_run(tmp_path / "runs" / "demo", run)
    (folder / CHECKPOINTS_FOLDER / "step-00000040" / "model").rmdir()
    assert "step-00000040' contains no language model" in chat_with("demo@best")


@pytest.mark.parametrize(
    ("keep", "model"), [("best", "model"), ("last", "checkpoints/step-00000060/model")]
)
def test_the_best_model_of_a_fine_tuning_run_is_the_kept_one(
    tmp_path: Path, chat_with: Callable[[str], str], keep: str, model: str
) -> None:
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "validation": {"keep": keep}}
    run = SftRun.model_validate({"name": "demo"} | sections)
    folder = make_run(tmp_path / "runs" / "demo", run)
    (folder / "model").mkdir()
    losses = {0: 1.0, 40: 3.0, 60: 2.0, 80: 2.5}
    rows = [make_row("event", step, validation_loss=loss) for step, loss in losses.items()]
    (folder / METRICS_FILE).write_text("".join(rows))
    assert chat_with("demo@best") == f"runs/demo/{model}"
    assert chat_with("demo@latest") == "runs/demo/checkpoints/step-00000080/model"


def test_the_best_checkpoint_of_an_unvalidated_fine_tuning_run_is_explained(
    tmp_path: Path, chat_with: Callable[[str], str]
) -> None:
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "validation": {"size": 0}}
    folder = make_run(tmp_path / "runs" / "demo", SftRun.model_validate(sections), {})
    (folder / "model").mkdir()
    assert "(validation.size = 0; raise it)" in chat_with("demo@best")


@pytest.mark.parametrize(
    ("win_rates", "best"),
    [(WIN_RATES, "step 40, wins 70.0%: {}@best"), ({0: 0.1, 40: 0.2, 80: 0.3}, None)],
    ids=["earlier", "latest"],
)
def test_the_end_of_a_run_names_its_model_its_best_step_and_its_size(
    tmp_path: Path, win_rates: dict[int, float], best: str | None
) -> None:
    folder = make_run(tmp_path / "runs" / "demo", win_rates=win_rates)
    (folder / "checkpoints" / "step-00000080" / "model" / "weights").write_bytes(bytes(2_000_000))
    lines = dict(list_result_lines(folder))
    assert lines["model"] == str(folder / "checkpoints" / "step-00000080" / "model")
    assert lines.get("best") == (best and best.format(folder))
    assert lines["folder"] == f"{folder}, 2 MB"

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ludus.proto.runs import CHECKPOINTS_FOLDER, METRICS_FILE
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the commands that would replace the process."""
    started_commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started_commands.append(command))
    return started_commands


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "demo"
    for step in (2, 4):
        (folder / CHECKPOINTS_FOLDER / f"step-{step:08d}" / "model").mkdir(parents=True)
    (folder / METRICS_FILE).write_text("")
    return folder


@pytest.mark.parametrize(
    ("model", "argument"),
    [
        ("demo", "runs/demo"),
        ("runs/demo", "runs/demo"),
        ("demo@2", "runs/demo/checkpoints/step-00000002/model"),
        ("organization/name", "organization/name"),
    ],
)
def test_a_run_a_checkpoint_or_a_model_can_be_named(
    ludus: RunCli, run_folder: Path, commands: list[list[str]], model: str, argument: str
) -> None:
    assert ludus("chat", model, "--temperature", "0").code == 0
    assert f"--model={argument}" in commands[0] and "--temperature=0.0" in commands[0]


def test_the_kept_model_of_a_fine_tuning_run_is_preferred(
    ludus: RunCli, run_folder: Path, commands: list[list[str]]
) -> None:
    (run_folder / "model").mkdir()
    for kind, folder in (("language_model", "runs/demo"), ("sft", "runs/demo/model")):
        (run_folder / "config.json").write_text(f'{{"kind": "{kind}"}}')
        ludus("chat", "demo")
        assert f"--model={folder}" in commands[-1]


def test_a_folder_of_a_model_is_not_taken_for_a_run(
    ludus: RunCli, run_folder: Path, commands: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")
    ludus("chat", "./demo")
    assert "--model=./demo" in commands[0]


def test_another_folder_does_not_hide_a_run(
    ludus: RunCli, run_folder: Path, commands: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "demo").mkdir()
    ludus("chat", "demo")
    assert "--model=runs/demo" in commands[0]


def test_an_environment_is_named_with_its_options(
    ludus: RunCli, run_folder: Path, commands: list[list[str]]
) -> None:
    options = ["--env", "openspiel_env", "--option", "game=blackjack", "--max-calls", "3"]
    assert ludus("chat", "demo", *options).code == 0
    assert "--env=openspiel_env" in commands[0]
    assert '--env-options={"game": "blackjack"}' in commands[0]
    assert "--max-calls=3" in commands[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "opnspiel_env"], "opnspiel_env"),
        (["--env", "openspiel_env", "--option", "gam=x"], "gam"),
        (["--env", "grpc://localhost:1", "--option", "a=b"], "cannot be combined with an address"),
        (["--option", "a=b"], "--option is for the environment of --env, which is missing"),
    ],
)
def test_a_wrong_environment_is_refused_before_the_model_is_loaded(
    ludus: RunCli,
    run_folder: Path,
    commands: list[list[str]],
    arguments: list[str],
    message: str,
) -> None:
    result = ludus("chat", "demo", *arguments)
    assert result.code == 2 and not commands
    assert message in result.err


def test_a_missing_step_is_refused(
    ludus: RunCli, run_folder: Path, commands: list[list[str]]
) -> None:
    result = ludus("chat", "demo@3")
    assert result.code == 2 and not commands
    assert "run 'runs/demo' has no checkpoint '3'; it has 2, 4, and 'latest'" in result.err

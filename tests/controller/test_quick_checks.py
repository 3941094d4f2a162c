"""Mistakes that the trainer reports before it imports torch, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import sys
from ludus.trainer.__main__ import main
for name in sys.argv[1:]:
    command, _, options = name.partition(":")
    sys.stderr.write(f"{main([command, '--config', *options.split()])}\\n")
    assert "torch" not in sys.modules, name
"""
RULES = """
def score(completions, answer): return []
def judge(completion): return []
def positional(completions, /): return []
"""
ENVIRONMENT = {"package": "prompts_env", "options": {"path": "rows.csv", "prompt": "question"}}
SFT = {"kind": "sft", "model": {"path": "./nowhere"}, "data": {"path": "rows.csv"}}
MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "function": ("train", {"rewards": ["my_rules:scroe"]}, "did you mean 'score'?"),
    "module": ("check", {"rewards": ["my_ruls:score"]}, "did you mean 'my_rules'?"),
    "signature": ("check", {"rewards": ["my_rules:positional"]}, "remove the '/'"),
    "argument": ("check", {"rewards": ["my_rules:judge"]}, "did you mean 'completions'?"),
    "column": (
        "check",
        {"options": {"path": "rows.csv", "prompt": "qestion"}},
        "prompt names the column 'qestion', but the first row has question, answer; did you mean",
    ),
    "data": ("check", {"options": {"path": "row.csv"}}, "did you mean 'rows.csv'?"),
    "package": ("check", {"package": "promts_env"}, "did you mean 'prompts_env'?"),
    "agent": (
        "check",
        {"agent": {"command": ["no_such_program"]}},
        "there is no executable program 'no_such_program' in PATH",
    ),
    "policy": (
        "check",
        {
            "package": "math_env",
            "options": {},
            "policies": "math_env.policies:fixed_policies",
            "baselines": ["optimall"],
        },
        "did you mean 'optimal'?",
    ),
    "passed_function": (
        "eval",
        {"rollout": "given:play"},
        "environment.rollout = 'given:play': this function was passed by the program",
    ),
    "address": (
        "check",
        {"kind": "remote", "address": "http://host:70000", "package": None, "options": None},
        "environment.address: expected an address like",
    ),
}


def write_config(folder: Path, name: str, **sections: Any) -> str:
    config = {"name": "demo", "output_dir": str(folder), **sections}
    (folder / f"{name}.json").write_text(json.dumps(config))
    return f"{name}.json"


def run_trainer(folder: Path, *commands: str) -> list[str]:
    """Run commands of the trainer in one process; return its messages and exit codes."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *commands],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.csv").write_text("question,answer\n1 + 1?,2\n")
    (tmp_path / "my_rules.py").write_text(RULES)
    return tmp_path


@pytest.mark.slow
def test_misspelt_names_are_reported_without_torch(folder: Path) -> None:
    commands = []
    for name, (command, changes, _) in MISTAKES.items():
        environment = {
            key: value for key, value in (ENVIRONMENT | changes).items() if value is not None
        }
        config = write_config(folder, name, environment=environment)
        commands.append(f"{command}:{config}")
    lines = run_trainer(folder, *commands)
    assert lines[1::2] == ["2"] * len(MISTAKES)
    for line, (_, _, message) in zip(lines[::2], MISTAKES.values(), strict=True):
        assert line.startswith("error: ") and message in line


@pytest.mark.slow
def test_missing_folders_are_reported_without_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = folder / "checkpoints"
    (folder / "metrics.jsonl").touch()
    run.mkdir()
    pretrained = {"kind": "pretrained", "path": "./nowhere"}
    lines = run_trainer(
        folder,
        f"check:{write_config(folder, 'model', model=pretrained)}",
        f"check:{write_config(folder, 'run', model=pretrained | {'path': '.'})}",
        f"train:{write_config(folder, 'resume')} --resume",
        f"check:{write_config(folder, 'tuning', **SFT)}",
        f"check:{write_config(folder, 'sink', metrics={'wandb': True})}",
        f"check:{write_config(folder, 'rows', **SFT | {'data': {'path': 'chats.jsonl'}})}",
    )
    assert lines[1::2] == ["2"] * 6
    messages = (
        f"model.path = './nowhere': there is no such folder in the working folder '{folder}'",
        "model.path = '.' is the folder of a run; write its model to a folder with `ludus export",
        "there is no checkpoint in '.*', so the run cannot be resumed; start it as a new run",
        "model.path = './nowhere': there is no such folder",
        "metrics.wandb.mode = 'online' needs a key in WANDB_API_KEY, which is not set",
        "data.path = 'chats.jsonl' does not exist in the working folder",
    )
    for line, message in zip(lines[::2], messages, strict=True):
        assert message.partition("'.*'")[2] in line and message.partition("'.*'")[0] in line

"""The example of a model that learns to think: its data and its settings."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ludus.env.targets.targets import environment_factory
from ludus.proto.config import LocalEnvironment, load_run_config
from ludus.proto.seeds import FIRST_EVAL_SEED
from ludus.trainer.rollout.rewards.arguments import check_columns
from ludus.trainer.sft.examples import read_examples
from prompts_env import rules

EXAMPLE = Path(__file__).parents[2] / "examples" / "thinking"


def run_program(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    module.main()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of the example."""
    run_program("make_data", [str(tmp_path / "data"), "--num-chats", "50"], monkeypatch)
    return tmp_path / "data"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_conversations_think_and_are_right(data: Path) -> None:
    chats = read(data / "chats.jsonl")
    examples = list(read_examples(str(data / "chats.jsonl"), split="train", field="data.path"))
    assert len(examples) == len(chats) == 50
    answers = [eval(chat["prompt"].removesuffix(" = ?")) for chat in chats]
    completions = [chat["completion"] for chat in chats]
    assert rules.thinking_rule(completions, answers) == [1.0] * 50
    assert [completion.partition("</think>")[2] for completion in completions] == [
        str(answer) for answer in answers
    ]


def test_held_back_sums_are_in_no_other_file(data: Path) -> None:
    prompts = [
        {row["prompt"] for row in read(data / name)}
        for name in ("chats.jsonl", "sums.jsonl", "test.jsonl")
    ]
    assert [len(questions) for questions in prompts] == [50, 4000, 400]
    assert len(set.union(*prompts)) == 4450


def test_run_plays_held_back_sums_in_evaluations(data: Path) -> None:
    overrides = [
        f"environment.options.path={data}/sums.jsonl",
        f"environment.options.test_path={data}/test.jsonl",
    ]
    run = load_run_config(EXAMPLE / "smollm2.toml", overrides)
    config = run.environment
    assert isinstance(config, LocalEnvironment)
    environment = environment_factory(config.package, config.options)()
    assert environment.tasks is not None and environment.tasks.num_test_tasks == 400
    row = environment.reset(seed=FIRST_EVAL_SEED).info
    assert row["prompt"] in {row["prompt"] for row in read(data / "test.jsonl")}
    functions = [term.function for term in config.rewards]
    check_columns(functions, ["prompt", "answer"], "environment")


def test_shares_count_right_answers_with_a_thought_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [("<think>1+1=2</think>2", True), ("2", True), ("<think>1+1=3</think>3", False)]
    episodes = [
        {"policy": "tuned", "success": success, "turns": [{"answer": answer}]}
        for answer, success in [*answers, ("<think>2", False)]
    ]
    path = tmp_path / "eval.json"
    path.write_text(json.dumps({"episodes": [*episodes, {"policy": "random", "turns": []}]}))
    run_program("show_shares", [str(path)], monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("tuned   right after a thought 0.250 (")
    assert "   thought 0.500 (" in lines[0]

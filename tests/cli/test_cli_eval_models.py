"""Tests of `ludus eval --model`, with the trainer in this process instead of a child process."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel

from ludus.env.evaluation import compute_mean_interval
from ludus.proto.config import TinyModel
from ludus.proto.evaluations import ModelEvaluation
from ludus.services.cli import train_command
from ludus.services.cli.trainer_process import TrainerEnd, TrainerOutput
from ludus.trainer.__main__ import main as run_trainer_main
from ludus.trainer.models.tiny import make_model, make_tokenizer, save
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SUMS = [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(4) for b in range(4)]
FIRST_SEED = 2**31


def write_model(folder: Path, seed: int, max_tokens: int = 64) -> None:
    texts = [text for row in SUMS for text in row.values()] * 5
    tokenizer = make_tokenizer(texts, 300)
    config = TinyModel(width=32, num_heads=1, intermediate=32, num_layers=1, max_tokens=max_tokens)
    save(make_model(config, tokenizer, seed), tokenizer, folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny models `a`, `b` and `short`, and return their folder."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        write_model(folder / name, seed)
    write_model(folder / "short", 0, max_tokens=20)
    return folder


@pytest.fixture
def files(ludus: RunCli, tmp_path: Path, models: Path) -> Path:
    """Put the models and a data set into the empty working directory, and return it."""
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    rows = "".join(json.dumps(row) + "\n" for row in SUMS)
    (tmp_path / "sums.jsonl").write_text(rows)
    return tmp_path


@pytest.fixture(autouse=True)
def use_trainer_in_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run the trainer in this process, which has already imported torch."""

    def run(
        arguments: Sequence[str],
        config: BaseModel | None = None,
        *,
        warn: Callable[[str], None],
        on_tick: Callable[[], None],
        on_stopping: Callable[[], None],
    ) -> TrainerEnd:
        folder = Path(arguments[arguments.index("--folder") + 1])
        assert config is not None
        (folder / "config.json").write_text(config.model_dump_json())
        code = run_trainer_main([*arguments, "--config", str(folder / "config.json")])
        on_tick()
        output = TrainerOutput()
        for line in capfd.readouterr().err.splitlines():
            output.add_line(line)
        for warning in output.warnings:
            warn(warning)
        return TrainerEnd(code, was_stopped=False, was_killed=False, output=output)

    monkeypatch.setattr(train_command, "run_trainer", run)


DATA = ("--env", "prompts_env", "--option", "path=sums.jsonl", "--option", "answer=answer")


def evaluate(ludus: RunCli, *arguments: str) -> tuple[ModelEvaluation, str]:
    """Run `ludus eval` with a JSON file, and return the result and the output."""
    outcome = ludus("eval", "--max-completion-tokens", "4", "--json", "out.json", *arguments)
    assert outcome.code == 0, outcome.err
    return ModelEvaluation.model_validate_json(Path("out.json").read_bytes()), outcome.out


def test_two_models_play_the_same_seeds(ludus: RunCli, files: Path) -> None:
    evaluation, out = evaluate(
        ludus, "--model", "a", "--model", "./b", *DATA, "--episodes", "6", "--report", "out.html"
    )
    episodes = {
        policy: [episode for episode in evaluation.episodes if episode.policy == policy]
        for policy in ("random", "a", "./b")
    }
    for policy_episodes in episodes.values():
        assert [episode.seed - FIRST_SEED for episode in policy_episodes] == list(range(6))
    for name in ("a", "./b"):
        assert all(turn.answer for episode in episodes[name] for turn in episode.turns)
        assert "=" in episodes[name][0].turns[0].shown[0].text
        returns = [episode.episode_return for episode in episodes[name]]
        result = evaluation.models[name].result
        assert result.expected_return_ci95 == compute_mean_interval(returns)
        assert name in out
    differences = [
        first.episode_return - second.episode_return
        for first, second in zip(episodes["a"], episodes["./b"], strict=True)
    ]
    (difference,) = evaluation.differences
    assert (difference.first, difference.second, difference.num_tasks) == ("a", "./b", 6)
    assert difference.return_difference_ci95 == compute_mean_interval(differences)
    assert "random" in evaluation.baselines and evaluation.is_finished
    check_report(files / "out.html", episodes["a"][0].turns[0].shown[0].text)


def check_report(path: Path, prompt: str) -> None:
    """Check that the page is well-formed, uses no external resource, and shows a prompt."""
    page = path.read_text(encoding="utf-8")
    root = ET.fromstring(page.removeprefix("<!doctype html>\n"))
    assert not re.search(r"https?://|url\(|@import|src=|href=", page)
    texts = ["".join(element.itertext()) for element in root.iter("pre")]
    assert prompt in texts
    rows = [" ".join("".join(row.itertext()).split()) for row in root.iter("tr")]
    assert any(row.startswith("random") for row in rows)
    assert any(row.startswith("a − ./b") for row in rows)


def test_temperature_0_is_repeatable_and_plays_each_task_once(ludus: RunCli, files: Path) -> None:
    arguments = ("--model", "a", *DATA, "--option", "test_size=5", "--temperature", "0")
    first, out = evaluate(ludus, *arguments, "--episodes", "9")
    second, _ = evaluate(ludus, *arguments, "--episodes", "9", "--seed", "0")
    select = [episode for episode in first.episodes if episode.policy == "a"]
    assert select == [episode for episode in second.episodes if episode.policy == "a"]
    assert (first.num_episodes, first.num_episodes_requested) == (5, 9)
    assert "5 of 9 episodes were played, one for each task" in out


def test_prompts_beyond_the_context_are_counted_as_truncated(ludus: RunCli, files: Path) -> None:
    rows = [{"prompt": "1 + 1 = ?" * count, "answer": "2"} for count in (1, 9)]
    (files / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation, out = evaluate(ludus, "--model", "short", *DATA, "--episodes", "2")
    model = evaluation.models["short"]
    assert (model.result.num_games, model.result.num_void) == (2, 0)
    statuses = {episode.status for episode in evaluation.episodes if episode.policy == "short"}
    assert statuses == {"terminated", "truncated"}
    assert "short: 1 of 2 episodes were truncated: the first prompt leaves no room" in out
    assert "the model's context of 20 tokens" in " ".join(out.split())


def test_tools_are_called(ludus: RunCli, files: Path) -> None:
    target = "tests.rollout.calculator_env:CalculatorEnv"
    evaluation, _ = evaluate(ludus, "--model", "a", "--env", target, "--tools", "--episodes", "2")
    assert evaluation.models["a"].result.num_games == 2

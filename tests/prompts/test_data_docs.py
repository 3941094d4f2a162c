"""The complete example of docs/data.md: its questions, its reward and its configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ludus.env.targets.targets import environment_factory
from ludus.proto.config import LanguageModelRun, LocalEnvironment, RewardTerm
from ludus.proto.config.load import load_run_config
from ludus.trainer.core.functions import import_callable

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
FILES = {"csv": "questions.csv", "python": "my_rewards.py", "toml": "opposites.toml"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModelRun:
    """Write the files of the example to an empty working folder; return the configuration."""
    section = PAGE.partition("## A complete example")[2].partition("\n## ")[0]
    for language, name in FILES.items():
        (block,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
        (tmp_path / name).write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_run_config(tmp_path / "opposites.toml")
    assert isinstance(config, LanguageModelRun)
    return config


def test_questions_are_tasks_and_some_are_held_back(run: LanguageModelRun) -> None:
    environment_config = run.environments["prompts"]
    assert isinstance(environment_config, LocalEnvironment)
    environment = environment_factory("prompts_env", environment_config.options)()
    assert environment.tasks is not None
    assert (environment.tasks.num_tasks, environment.tasks.num_test_tasks) == (8, 2)
    assert environment.tasks.columns == ("question", "answer")
    environment.close()


def test_reward_prefers_the_answer_in_one_word(run: LanguageModelRun) -> None:
    (term,) = run.environments["prompts"].rewards
    assert isinstance(term, RewardTerm) and term.function is not None
    reward = import_callable(term.function, "rewards")
    texts = ["Cold.", "The opposite is cold.", "warm", ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert reward(completions=completions, answer=["cold"] * len(texts)) == [1.0, 0.2, 0.0, 0.0]

"""The examples, names and numbers in docs/data.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ludus.env.targets.targets import environment_factory
from ludus.proto.config import EvalConfig, LanguageModelRun, LocalEnvironment, RewardTerm
from ludus.proto.config.load import load_run_config
from ludus.trainer.core.functions import import_callable
from ludus.trainer.rollout.rewards.arguments import STANDARD_ARGUMENTS
from prompts_env import rules

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


def test_first_example_reads_the_file_that_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.partition("\n## ")[0]
    (python_block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (toml_block,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(python_block, "data.md", "exec"), {})
    Path("run.toml").write_text(toml_block, encoding="utf-8")
    config = load_run_config(Path("run.toml"))
    assert isinstance(config, LanguageModelRun)
    environment_config = config.environments["prompts"]
    assert isinstance(environment_config, LocalEnvironment)
    environment = environment_factory("prompts_env", environment_config.options)()
    assert environment.tasks is not None and environment.tasks.num_test_tasks == 1
    environment.close()


def test_arguments_of_every_function_are_listed() -> None:
    listed_text = PAGE.partition("an argument that every function gets (")[2].partition(")")[0]
    assert set(re.findall(r"`(\w+)`", listed_text)) == STANDARD_ARGUMENTS


def test_rules_are_listed() -> None:
    section = PAGE.partition("## Built-in rules")[2].partition("\n## ")[0]
    public_functions = {
        name
        for name, function in vars(rules).items()
        if getattr(function, "__module__", "") == rules.__name__ and not name.startswith("_")
    } - {"find_last_text"}
    assert public_functions <= set(re.findall(r"`(\w+)`", section))
    assert f"`max_words` (default {rules.MAX_WORDS})" in section


def test_number_of_episodes_of_a_row_is_that_of_the_configuration() -> None:
    assert f"`eval.max_games_per_task` times, {EvalConfig().max_games_per_task} by default" in PAGE

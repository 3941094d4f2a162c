"""Messages about mistakes in a configuration: they name the field and what the user can write."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.config import (
    LanguageModelRun,
    PrometheusSink,
    RewardTerm,
    WandbSink,
    load_run_config,
    make_run_config,
)
from ludus.proto.errors import ConfigError, NotFoundError


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"training": {"num_steps": "ten"}}, "training.num_steps: expected a whole number, got"),
        ({"learner": {"learning_rate": "x"}}, "learner.learning_rate: expected a number, got 'x'"),
        ({"metrics": {"tensorboard": 3}}, "metrics.tensorboard: expected true or false, got 3"),
        ({"metrics": {"wandb": "on"}}, "metrics.wandb: expected a section with fields, got 'on'"),
        ({"learner": 3}, "learner: expected a section with fields, got 3"),
        ({"model": {"lora": {"targets": "x"}}}, "lora.targets: expected a list in square brackets"),
        ({"name": 3}, "name: expected text, got 3"),
        ({"name": "a/b"}, r"name: expected 1 to 47 letters, digits, .*, got 'a/b'"),
        ({"rollout": {"group_size": 1}}, "group_size: expected a value greater than or equal to 2"),
        ({"preset": "dappo"}, r"preset: expected .*, got 'dappo'; did you mean 'dapo'\?"),
        ({"log_level": "warn"}, r"log_level: expected 'debug', .*; did you mean 'warning'\?"),
        ({"algorithm": {"kind": "gpro"}}, r"algorithm\.kind: .*'gpro'; did you mean 'grpo'\?"),
        ({"kind": "netwrk"}, r"\n  kind: expected one of .*; did you mean 'network'\?"),
        ({"enviroment": {}}, r"enviroment: unknown key; did you mean 'environment'\?"),
        (
            {"model": {"path": "m"}},
            "unknown key of model.kind = 'tiny'; set model.kind = 'pretrain",
        ),
        ({"ppo": {}}, "ppo: unknown key of kind = 'language_model'; set kind = 'network', or"),
        (
            {"environment": {"rewards": [{"function": "score"}]}},
            r"  environment\.rewards\.0\.function: expected module:function, .*, got 'score'",
        ),
        ({"environment": {"rewards": "m:f"}}, "environment.rewards: expected a list in square"),
    ],
)
def test_mistake_is_explained_without_terms_of_the_parser(
    tree: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_run_config(tree)


def test_unknown_section_keeps_the_name_that_the_user_wrote() -> None:
    with pytest.raises(ConfigError, match=r"\n  environment: unknown key of kind = 'sft'"):
        make_run_config({"kind": "sft", "environment": {}})


def test_text_without_quotes_has_a_hint(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("name = demo\n")
    with pytest.raises(ConfigError, match=r"line 1, column 8\); text must be in quotes"):
        load_run_config(tmp_path / "run.toml")


def test_misspelt_file_has_a_hint(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    with pytest.raises(
        NotFoundError, match=r"rum\.toml' does not exist; did you mean 'run\.toml'\?"
    ):
        load_run_config(tmp_path / "rum.toml")


def test_true_takes_the_defaults_of_a_sink() -> None:
    metrics = make_run_config({"metrics": {"wandb": True, "prometheus": True}}).metrics
    assert (metrics.wandb, metrics.prometheus) == (WandbSink(), PrometheusSink())
    assert make_run_config({"metrics": {"wandb": False}}).metrics.wandb is None


def test_reward_function_may_be_given_by_its_name_alone() -> None:
    run = make_run_config({"environment": {"rewards": ["my_rewards:score"]}})
    assert isinstance(run, LanguageModelRun)
    assert run.environment.rewards == (RewardTerm(function="my_rewards:score"),)

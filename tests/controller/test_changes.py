"""Configuration changes that a resumed run allows."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.config import LanguageModelRun, load_run_config, make_run_config
from ludus.proto.config.changes import describe_changes
from ludus.proto.errors import ConfigError
from ludus.proto.runs import CONFIG_FILE
from ludus.trainer.driver.trainer import Trainer
from ludus.trainer.run.lifecycle import RunFolder, find_config_changes
from ludus.trainer.run.metrics_writer import MetricsWriter
from tests.controller.test_checkpoints import save_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "blackjack" / "tiny.toml"


@pytest.fixture
def started_run(tmp_path: Path) -> LanguageModelRun:
    """Return a run whose folder contains its configuration."""
    run = load_run_config(EXAMPLE)
    (tmp_path / CONFIG_FILE).write_text(run.model_dump_json())
    return run


def change_run(run: LanguageModelRun, *overrides: str) -> LanguageModelRun:
    return make_run_config(run.model_dump(mode="json"), overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=256", r"model.width was \d+ and is 256"),
        ("algorithm.kind=ppo", "algorithm.kind was 'grpo' and is 'ppo'"),
    ],
)
def test_model_and_algorithm_cannot_change(
    tmp_path: Path, started_run: LanguageModelRun, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_config_changes(tmp_path, change_run(started_run, override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=7", f"seed was {load_run_config(EXAMPLE).seed} and is 7"),
        ("learner.learning_rate=0.5", "is 0.5"),
        ("environments.blackjack.options.game=pig", "options.game was 'blackjack' and is 'pig'"),
        ("environments.more.package=math_env", "environments.more was None and is {"),
        (
            "training.num_steps=900",
            "is 900, so algorithm.kl_coef_final = 0.0 and learner.schedule = 'linear' follow the "
            "new length",
        ),
    ],
)
def test_changes_that_affect_results_are_reported(
    tmp_path: Path, started_run: LanguageModelRun, override: str, message: str
) -> None:
    changes = find_config_changes(tmp_path, change_run(started_run, override))
    assert message in describe_changes(changes)


@pytest.mark.parametrize(
    "override", ["training.keep_checkpoints=9", "rollout.num_workers=2", "metrics.tensorboard=true"]
)
def test_run_length_and_location_can_change(
    tmp_path: Path, started_run: LanguageModelRun, override: str
) -> None:
    assert find_config_changes(tmp_path, change_run(started_run, override)) == []


@pytest.mark.parametrize("kind", ["language model", "network"])
def test_length_of_a_run_without_schedules_can_change(tmp_path: Path, kind: str) -> None:
    fields: dict[str, Any] = {"training": {"num_steps": 10}}
    if kind == "network":
        fields |= {
            "kind": "network",
            "environment": {"package": "gymnasium:CartPole-v1"},
            "ppo": {"schedule": "constant"},
        }
    old_run = make_run_config(fields)
    (tmp_path / CONFIG_FILE).write_text(old_run.model_dump_json())
    new_run = make_run_config(old_run.model_dump(mode="json"), ["training.num_steps=20"])
    assert find_config_changes(tmp_path, new_run) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.scale_rewards=true", "ppo.scale_rewards was False and is True"),
        ("ppo.critic_learning_rate=0.01", "ppo.critic_learning_rate was None and is 0.01"),
    ],
)
def test_parts_of_a_network_checkpoint_cannot_change(
    tmp_path: Path, override: str, message: str
) -> None:
    fields = {"kind": "network", "environment": {"package": "gymnasium:CartPole-v1"}}
    old_run = make_run_config(fields)
    (tmp_path / CONFIG_FILE).write_text(old_run.model_dump_json())
    with pytest.raises(ConfigError, match=message):
        find_config_changes(tmp_path, make_run_config(old_run.model_dump(mode="json"), [override]))


@pytest.mark.parametrize(("critic", "is_refused"), [("head", True), ("model", False)])
def test_critic_can_get_a_learning_rate_only_if_it_is_a_separate_model(
    tmp_path: Path, critic: str, is_refused: bool
) -> None:
    old_run = make_run_config({"algorithm": {"kind": "ppo", "critic": {"kind": critic}}})
    (tmp_path / CONFIG_FILE).write_text(old_run.model_dump_json())
    new_run = change_run(old_run, "algorithm.critic.learning_rate=0.01")
    expectation = (
        pytest.raises(ConfigError, match=r"critic\.learning_rate was None and is 0\.01")
        if is_refused
        else contextlib.nullcontext()
    )
    with expectation:
        find_config_changes(tmp_path, new_run)


def test_unreadable_configuration_is_reported(
    tmp_path: Path, started_run: LanguageModelRun
) -> None:
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(ConfigError, match=rf"{CONFIG_FILE}' must contain the configuration"):
        find_config_changes(tmp_path, started_run)


def test_many_changes_are_summarized(tmp_path: Path, started_run: LanguageModelRun) -> None:
    overrides = [f"environments.more{number}.package=math_env" for number in range(30)]
    description = describe_changes(
        find_config_changes(tmp_path, change_run(started_run, *overrides))
    )
    assert description.endswith("and 10 more")


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file except the lock, by relative path."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


async def test_refused_resume_changes_no_file(tmp_path: Path) -> None:
    run = load_run_config(EXAMPLE, [f"output_dir={json.dumps(str(tmp_path))}", "name=run"])
    folder = RunFolder.create(run, overwrite=False)
    metrics = MetricsWriter(run, folder.path)
    metrics.log_step(7, 70, {}, {})
    metrics.close()
    folder.close()
    await save_checkpoint(folder.path / "checkpoints", 5)
    previous_files = read_files(folder.path)
    with pytest.raises(ConfigError, match=r"algorithm\.kind was 'grpo' and is 'ppo'"):
        async with Trainer(change_run(run, "algorithm.kind=ppo"), resume="always"):
            pass
    assert read_files(folder.path) == previous_files


def test_resumed_run_writes_the_new_configuration(tmp_path: Path) -> None:
    run = load_run_config(EXAMPLE, [f"output_dir={json.dumps(str(tmp_path))}", "name=run"])
    folder = RunFolder.create(run, overwrite=False)
    folder.close()
    previous_content = (folder.path / CONFIG_FILE).read_bytes()
    changed_run = change_run(run, "learner.learning_rate=0.5")
    reopened_folder = RunFolder.reopen(changed_run)
    assert (folder.path / CONFIG_FILE).read_bytes() == previous_content
    reopened_folder.write(CONFIG_FILE, changed_run)
    assert load_run_config(folder.path / CONFIG_FILE).learner.learning_rate == 0.5
    reopened_folder.close()

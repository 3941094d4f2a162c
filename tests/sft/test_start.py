"""Errors before a fine-tuning run starts, and the use of its model by a later run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.proto.config import LanguageModelRun, SftRun, load_run_config, load_sft_config
from ludus.proto.config.changes import find_changes
from ludus.proto.errors import ConfigError, LudusError
from ludus.proto.runs import METRICS_FILE, Resume
from ludus.trainer.driver.checks import resolve_config
from ludus.trainer.sft import commands
from tests.sft.chats import make_rows, write_rows
from tests.sft.in_process import make_run


@pytest.mark.parametrize(
    ("rows", "sections", "message"),
    [
        ([], {}, "data.path = '.*' has no rows"),
        (1, {}, "validation.size = 0.25 holds out .* has only one"),
        (4, {"data": {"max_tokens": 100_000}}, "more than the 512 positions of model.path"),
        (4, {"data": {"max_tokens": 4}}, "4 of 4 conversations are longer than data.max_tokens"),
        (4, {"model": {"path": "./nowhere"}}, "model.path = './nowhere': there is no such folder"),
        (4, {"validation": {"path": "no.csv"}}, "validation.path = 'no.csv' does not exist"),
        (4, {"model": {"lora": {"targets": ["x"]}}}, "model.lora.targets"),
        (4, {"learner": {"num_gpus_per_rank": 64}}, "the run needs 1 learner rank with 64 GPU;"),
    ],
)
def test_run_that_cannot_start_is_refused_by_the_check(
    rows: Any, sections: dict[str, Any], message: str, model_path: str, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "chats.jsonl", make_rows(rows) if rows else [])
    run = make_run(model_path, data, tmp_path / "runs", **sections)
    for start in (commands.check, commands.train):
        if start is commands.train and "learner" in sections:
            continue  # this error needs Ray
        with pytest.raises(LudusError, match=message):
            start(run, resume=Resume.NEVER, overwrite=False)
        assert not (tmp_path / "runs").exists()


def test_check_prints_the_numbers_of_conversations(
    model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "chats.jsonl", make_rows(20))
    run = make_run(model_path, data, tmp_path, training={"num_epochs": 1.5, "num_steps": 1})
    commands.check(run, resume=Resume.NEVER, overwrite=False)
    assert "15 training conversations, 5 held out, 6 steps" in capsys.readouterr().out


def load(tmp_path: Path, text: str) -> SftRun:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_sft_config(path)


MINIMAL = 'kind = "sft"\nmodel = {path = "m"}\ndata = {path = "d"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "sft"', r"model: required, but not set\n  data: required"),
        (MINIMAL + "[validation]\nsize = 0\npatience = 2", "validation.patience = 2 needs"),
        (MINIMAL + "[validation]\npatiense = 2", "unknown key; did you mean 'patience'?"),
        (MINIMAL + "[learner]\nupdate_epochs = 2", "learner.update_epochs"),
        (MINIMAL + "[rollout]\ngroup_size = 2", "rollout: unknown key"),
        ('kind = "network"', "needs kind = 'sft'|is not a valid run"),
    ],
)
def test_invalid_configuration_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_file_without_kind_is_a_fine_tuning_run(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL.replace('kind = "sft"\n', ""))
    assert isinstance(run, SftRun)
    assert run.learning_rate == 2e-5
    assert run.training.num_epochs == 3.0


def test_number_of_steps_alone_replaces_the_number_of_passes(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL + "[training]\nnum_steps = 7")
    assert (run.training.num_steps, run.training.num_epochs) == (7, None)


def test_ludus_train_names_the_command_for_fine_tuning(tmp_path: Path) -> None:
    load(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match="train its model with `ludus sft`"):
        load_run_config(tmp_path / "run.toml")


def test_resume_refuses_another_model_and_allows_more_passes(tmp_path: Path) -> None:
    old_run, longer_run = (
        load(tmp_path, MINIMAL + f"[training]\nnum_epochs = {num_epochs}") for num_epochs in (1, 2)
    )
    [change] = find_changes(old_run, longer_run)
    assert "learner.schedule = 'linear' follow the new length" in str(change)
    other_run = load(tmp_path, MINIMAL.replace('"m"', '"other"'))
    with pytest.raises(ConfigError, match="must keep its model"):
        find_changes(old_run, other_run)


@pytest.mark.parametrize("path", ["runs/tuned", "./runs/tuned", "runs/tuned/model"])
def test_model_path_may_be_the_folder_of_a_fine_tuning_run(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/tuned"
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").touch()
    (folder / METRICS_FILE).touch()
    run = LanguageModelRun.model_validate({"model": {"kind": "pretrained", "path": path}})
    model = resolve_config(run).model
    assert model.kind == "pretrained"
    assert model.path == str(folder / "model")

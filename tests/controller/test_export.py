from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards

from ludus.proto.config import NetworkRun, PretrainedModel
from ludus.proto.errors import CheckpointError, ConfigError, NotFoundError
from ludus.trainer.run.checkpoint import MODEL_FOLDER
from ludus.trainer.setup import export
from ludus.trainer.setup.export import export_model
from tests.controller.trained_run import (
    make_original_model,
    make_run,
    make_summary,
    make_trained_run,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_original_model(tmp_path_factory.mktemp("original"))


@pytest.fixture
def run_folder(original: Path, tmp_path: Path) -> Path:
    return make_trained_run(original, tmp_path / "runs" / "demo")


def export_to(folder: Path, run_folder: Path, dtype: str | None, step: int | None = None) -> Path:
    folder.mkdir()
    checkpoint = None if step is None else run_folder / "checkpoints" / f"step-{step:08d}"
    export_model(run_folder, checkpoint, dtype, folder)
    return folder


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.state_dict()


def assert_weights_equal(folder: Path, checkpoint: Path, dtype: torch.dtype) -> None:
    exported, trained = load_weights(folder), load_weights(checkpoint / MODEL_FOLDER)
    assert exported.keys() == trained.keys()
    for name, weight in exported.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, trained[name].to(dtype)), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_export_is_the_latest_checkpoint_in_the_chosen_dtype(
    run_folder: Path, tmp_path: Path, dtype: str
) -> None:
    folder = export_to(tmp_path / "out", run_folder, dtype)
    checkpoint = run_folder / "checkpoints" / "step-00000004"
    assert_weights_equal(folder, checkpoint, getattr(torch, dtype))
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    text = "hard 16 vs 10"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected_tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint / MODEL_FOLDER)
    assert tokenizer(text).input_ids == expected_tokenizer(text).input_ids
    assert tokenizer.chat_template == expected_tokenizer.chat_template
    assert not (folder / "value_head.safetensors").exists()


def test_the_default_dtype_is_that_of_the_original_model(run_folder: Path, tmp_path: Path) -> None:
    folder = export_to(tmp_path / "out", run_folder, None, step=2)
    assert_weights_equal(folder, run_folder / "checkpoints/step-00000002", torch.bfloat16)


def test_without_the_original_model_the_dtype_is_kept_with_a_warning(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(PretrainedModel(path=str(tmp_path / "missing")))
    (run_folder / "config.json").write_text(run.model_dump_json())
    folder = export_to(tmp_path / "out", run_folder, None)
    assert_weights_equal(folder, run_folder / "checkpoints/step-00000004", torch.float32)
    assert "keep the dtype of the checkpoint" in capsys.readouterr().err


def test_weights_above_the_limit_are_split_over_files(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = functools.partial(split_torch_state_dict_into_shards, max_shard_size=20_000)
    monkeypatch.setattr(export, "split_torch_state_dict_into_shards", split)
    folder = export_to(tmp_path / "out", run_folder, "bfloat16")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert not (folder / "model.safetensors").exists()
    assert_weights_equal(folder, run_folder / "checkpoints/step-00000004", torch.bfloat16)


def test_the_card_has_the_results_of_the_last_step_only(run_folder: Path, tmp_path: Path) -> None:
    card = (export_to(tmp_path / "last", run_folder, None) / "README.md").read_text()
    summary = make_summary()
    assert summary.start is not None
    for result in (summary, summary.start):
        assert f"| {result.win_rate:.1%} (" in card
        assert f"| {result.expected_return:.3f} (" in card
    assert "weights of step 4" in card
    card = (export_to(tmp_path / "early", run_folder, None, step=2) / "README.md").read_text()
    assert "weights of step 2" in card
    assert f"{summary.win_rate:.1%}" not in card


@pytest.mark.parametrize(("is_game", "rate"), [(True, "win rate"), (False, "solve rate")])
def test_the_card_says_whether_episodes_are_won_or_solved(
    run_folder: Path, tmp_path: Path, is_game: bool, rate: str
) -> None:
    summary = json.loads((run_folder / "summary.json").read_text())
    for result in summary["results"].values():
        result["report"]["is_game"] = is_game
    (run_folder / "summary.json").write_text(json.dumps(summary))
    card = (export_to(tmp_path / "out", run_folder, None) / "README.md").read_text()
    assert f"| {rate} | " in card


def test_a_card_names_the_base_model_of_the_hub(run_folder: Path, tmp_path: Path) -> None:
    model_id = "owner/model-that-no-hub-has"
    run = make_run(PretrainedModel(path=model_id))
    (run_folder / "config.json").write_text(run.model_dump_json())
    card = (export_to(tmp_path / "out", run_folder, "float32") / "README.md").read_text()
    header = card.split("---\n")[1]
    assert f"base_model: {model_id}\n" in header


def test_texts_of_a_server_have_no_effect_in_a_card(run_folder: Path, tmp_path: Path) -> None:
    summary = make_summary()
    (name, result), *_ = summary.results.items()
    hostile_name = "x`|\n# Title <img src=y> \x1b[31m"
    results = {name: result.model_copy(update={"environment": hostile_name})}
    summary = summary.model_copy(update={"results": results})
    (run_folder / "summary.json").write_text(summary.model_dump_json())
    card = (export_to(tmp_path / "out", run_folder, "float32") / "README.md").read_text()
    assert "\x1b" not in card
    (row, _) = (line for line in card.splitlines() if "<img" in line)
    assert row.startswith("| `x'\\|") and row.count("`") == 2


def test_a_card_has_no_credentials(run_folder: Path, tmp_path: Path) -> None:
    config = json.loads((run_folder / "config.json").read_bytes())
    address = "http://user:secret@127.0.0.1:8000"
    config["environments"] = {"remote": {"kind": "remote", "address": address}}
    (run_folder / "config.json").write_text(json.dumps(config))
    card = (export_to(tmp_path / "out", run_folder, "float32") / "README.md").read_text()
    assert "127.0.0.1:8000" in card
    assert "secret" not in card


def test_a_checkpoint_that_disappears_is_not_exported(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_card = export.write_card

    def remove_and_write(*arguments: object) -> str:
        shutil.rmtree(run_folder / "checkpoints" / "step-00000004")
        return write_card(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(export, "write_card", remove_and_write)
    with pytest.raises(CheckpointError, match="while it was exported"):
        export_to(tmp_path / "out", run_folder, "bfloat16")


def test_a_damaged_checkpoint_is_not_exported(run_folder: Path, tmp_path: Path) -> None:
    path = run_folder / "checkpoints/step-00000004/model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="step-00000004"):
        export_model(run_folder, path.parents[1], None, tmp_path / "out")


def test_a_run_without_checkpoints_has_no_model(run_folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(run_folder / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        export_to(tmp_path / "out", run_folder, None)


def test_a_network_is_not_exported(run_folder: Path, tmp_path: Path) -> None:
    run = NetworkRun.model_validate(
        {"name": "demo", "environment": {"package": "gymnasium:CartPole-v1"}}
    )
    (run_folder / "config.json").write_text(run.model_dump_json())
    with pytest.raises(ConfigError, match="trains a network"):
        export_to(tmp_path / "out", run_folder, None)


def test_a_folder_without_a_run_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a run folder"):
        export_to(tmp_path / "out", tmp_path, None)

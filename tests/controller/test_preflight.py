"""Checks of `ludus train --dry-run`."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ludus.env.types import PolicyChartPrompt
from ludus.proto.config import TinyModel, load_run_config
from ludus.proto.errors import UserError
from ludus.proto.run_lock import RunLock
from ludus.proto.runs import CHECKPOINTS_FOLDER, Resume
from ludus.trainer.core.functions import get_or_register_path
from ludus.trainer.driver.checks import check_start
from ludus.trainer.models.tiny import make_model, make_tokenizer, save
from ludus.trainer.run.checkpoint import CheckpointFolder, RunState

EXAMPLE = Path(__file__).parents[2] / "examples" / "blackjack" / "tiny.toml"


def check_run(folder: Path, *overrides: str, resume: Resume = Resume.NEVER) -> None:
    output_override = f"output_dir={json.dumps(str(folder))}"
    check_start(load_run_config(EXAMPLE, [output_override, "name=run", *overrides]), resume)


def test_valid_run_passes_and_nothing_is_written(tmp_path: Path) -> None:
    check_run(tmp_path / "runs" / "deep")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.options.game=blackjak", "blackjak"),
        ("environment.package=blakjack_env", "no environment package 'blakjack_env'"),
        ("environment.policy_chart=openspiel_env.policy_chart:nothing", "no callable 'nothing'"),
        ('environment.baselines=["card_counter"]', "card_counter"),
        ('environment.rewards=[{"function": "no_such_module:f"}]', "no_such_module"),
        ('model={"kind": "pretrained", "path": "./no-such-model"}', "./no-such-model"),
        ("learner.num_gpus_per_rank=64", "the run needs"),
    ],
)
def test_each_start_problem_is_reported(tmp_path: Path, override: str, message: str) -> None:
    disabled_policies = ["environment.random_policy=null", "environment.optimal_policy=null"]
    with pytest.raises(UserError, match=message):
        check_run(tmp_path, *disabled_policies, override)


def test_unusable_run_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file' is not a writable folder"):
        check_run(tmp_path / "file")
    (tmp_path / "run").mkdir()
    lock = RunLock.take(tmp_path / "run")
    with pytest.raises(UserError, match="is in use"):
        check_run(tmp_path)
    lock.release()


def test_resume_without_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint"):
        check_run(tmp_path, resume=Resume.ALWAYS)
    check_run(tmp_path, resume=Resume.AUTO)


def test_damaged_checkpoint_is_reported_with_the_remedy(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / CHECKPOINTS_FOLDER / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(RunState(step=1).model_dump_json()[:50])
    with pytest.raises(UserError, match=r"cannot be read.*overwrite=True"):
        check_run(tmp_path, resume=Resume.ALWAYS)


async def test_resume_with_different_random_streams_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointFolder(tmp_path / "run" / CHECKPOINTS_FOLDER, num_kept=1)
    with checkpoints.prepare(5) as folder:
        await checkpoints.commit(folder, RunState(step=5), [])
    monkeypatch.setattr("ludus.trainer.run.checkpoint.STREAMS_VERSION", 2)
    with pytest.raises(UserError, match="streams of version 1, but this Ludus uses version 2"):
        await asyncio.to_thread(check_run, tmp_path, resume=Resume.ALWAYS)


def test_random_baseline_needs_no_fixed_policies(tmp_path: Path) -> None:
    disabled_policies = ["environment.policies=null", "environment.optimal_policy=null"]
    check_run(tmp_path, *disabled_policies, 'environment.baselines=["random"]')
    with pytest.raises(UserError, match="only 'random' works without it"):
        check_run(tmp_path, *disabled_policies, 'environment.baselines=["random", "dealer_rule"]')


def raise_type_error() -> None:
    raise TypeError("no prompts")


def return_prompts_for_deck(deck: list[str]) -> None:
    del deck


def return_different_answers() -> list[PolicyChartPrompt]:
    labels = {"reference": "A", "panel": "", "row": "", "column": ""}
    return [PolicyChartPrompt([], answers, **labels) for answers in (["A", "B"], ["A"])]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raise_type_error, "raised TypeError: no prompts"),
        (return_prompts_for_deck, "must be a function without arguments"),
        (lambda: None, "raised TypeError"),
        (lambda: [], "returned 0 prompts"),
        (return_different_answers, "all of them must have the same answers"),
    ],
)
def test_invalid_chart_prompts_are_reported_before_the_run(
    tmp_path: Path, function: Callable[..., object], message: str
) -> None:
    path = get_or_register_path(function)
    with pytest.raises(UserError, match=message):
        check_run(tmp_path, f"environment.policy_chart={json.dumps(path)}")


@pytest.mark.slow
def test_tokenizer_with_more_tokens_than_the_model_is_reported(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["hit stand"], 320)
    model = make_model(TinyModel(num_layers=1, width=64, num_heads=2), tokenizer, 0)
    tokenizer.add_tokens(["<a>", "<b>"])
    save(model, tokenizer, tmp_path / "model")
    overrides = (f'model={{"kind": "pretrained", "path": "{tmp_path / "model"}"}}',)
    with pytest.raises(UserError, match=r"model\.path.*the tokenizer has \d+ tokens, but"):
        check_run(tmp_path, *overrides)


def cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def name_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "file": (
        lambda folder: (shutil.rmtree(folder), folder.touch()),
        r"this is a file; expected a folder with config\.json",
    ),
    "no model": (
        lambda folder: (shutil.rmtree(folder), folder.mkdir()),
        r"there is no model; expected a folder with config\.json",
    ),
    "gguf": (
        lambda folder: (shutil.rmtree(folder), folder.mkdir(), (folder / "a.gguf").touch()),
        r"is a GGUF file, .*`ludus model convert .*a\.gguf FOLDER`",
    ),
    "no tokenizer": (
        lambda folder: [path.unlink() for path in folder.glob("*token*")],
        r"there is no tokenizer; copy its files into the folder",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"has a config\.json and no weights; copy the whole folder",
    ),
    "cut weights": (
        lambda folder: cut_file(folder / "model.safetensors"),
        r"model\.safetensors is incomplete or damaged",
    ),
    "missing shard": (name_missing_shard, r"model-00001-of-00002\.safetensors, which .* lists"),
    "cut tokenizer": (lambda folder: cut_file(folder / "tokenizer.json"), "cannot be loaded"),
    "no chat template": (
        lambda folder: (folder / "chat_template.jinja").unlink(),
        r"has no chat template; set model\.chat_template",
    ),
}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model."""
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = make_tokenizer(["hit stand"], 320)
    save(
        make_model(TinyModel(num_layers=1, width=64, num_heads=2), tokenizer, 0), tokenizer, folder
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_model_folder_is_reported_before_the_run(
    tmp_path: Path, tiny_folder: Path, breakage: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    overrides = (f'model={{"kind": "pretrained", "path": "{folder}"}}',)
    check_run(tmp_path / "runs", *overrides)
    break_folder, message = BREAKAGES[breakage]
    break_folder(folder)
    with pytest.raises(UserError, match=message) as error:
        check_run(tmp_path / "runs", *overrides)
    assert str(folder) in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_first_prompts_that_leave_no_room_are_reported(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["hit stand"], 320)
    model_settings = TinyModel(num_layers=1, width=64, num_heads=2)
    save(make_model(model_settings, tokenizer, 0), tokenizer, tmp_path / "model")
    model = f'model={{"kind": "pretrained", "path": "{tmp_path / "model"}"}}'
    check_run(tmp_path, model, "rollout.max_tokens=64")
    with pytest.raises(UserError, match=r"the shortest prompt has \d+ tokens"):
        check_run(tmp_path, model, "rollout.max_tokens=9", "rollout.max_completion_tokens=8")

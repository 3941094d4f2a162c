from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ludus.services.cli.branch import plan_branch, write_branch
from tests.cli.commands import RunCli
from tests.controller.trained_run import STEPS, make_original_model, make_trained_run

pytestmark = pytest.mark.slow

EARLY, LATE = STEPS


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_original_model(tmp_path_factory.mktemp("original"))


@pytest.fixture
def run_folder(
    original: Path, ludus: RunCli, use_fake_trainer: Callable[[str], None], tmp_path: Path
) -> Path:
    """Return a run with records of all steps up to the last checkpoint."""
    use_fake_trainer("succeeds")
    folder = make_trained_run(original, tmp_path / "runs" / "demo")
    rows = [make_row(step) for step in range(LATE + 1)]
    (folder / "metrics.jsonl").write_text("".join(rows) + '{"kind":"train","st')
    (folder / "initial_model").mkdir()
    (folder / "initial_model" / "config.json").write_text("{}")
    (folder / "run-id").write_text("abc")
    return folder


def make_row(step: int) -> str:
    row = {"kind": "train", "step": step, "elapsed_s": 1.0, "num_games_trained": 8 * step}
    return f"{json.dumps(row)}\n"


def read_all(folder: Path) -> dict[str, bytes]:
    """Return the content of every file in a folder."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def branch(ludus: RunCli, origin: str, *settings: str) -> str:
    options = [word for setting in settings for word in ("--set", setting)]
    result = ludus("train", "--from", origin, *options)
    assert result.code == 0, result.err
    return result.err


def list_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


@pytest.mark.parametrize(
    ("origin", "step"),
    [
        ("demo", LATE),
        (f"demo@{LATE}", LATE),
        (f"demo@{EARLY}", EARLY),
        (f"runs/demo@{EARLY}", EARLY),
    ],
)
def test_a_branch_resumes_from_a_copy_of_the_checkpoint(
    ludus: RunCli, run_folder: Path, tmp_path: Path, origin: str, step: int
) -> None:
    original_files = read_all(run_folder)
    output = branch(ludus, origin, "name=other", "training.num_steps=9")
    assert f"step-{step:08d}" in output
    assert read_all(run_folder) == original_files

    folder = tmp_path / "runs" / "other"
    name = f"step-{step:08d}"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [name]
    assert read_all(folder / "checkpoints" / name) == read_all(run_folder / "checkpoints" / name)
    assert (folder / "initial_model" / "config.json").exists()
    assert not (folder / "run-id").exists()
    assert json.loads((folder / "flags").read_text()) == ["--resume=always"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["name"], config["training"]["num_steps"]) == ("other", 9)


def test_a_branch_has_the_records_up_to_its_step(run_folder: Path, tmp_path: Path) -> None:
    for step in STEPS:
        new_branch = plan_branch(f"demo@{step}", [f"name=from-{step}"])
        write_branch(new_branch)
        assert list_steps(new_branch.folder) == list(range(step + 1))


def test_a_branch_needs_another_name(ludus: RunCli, run_folder: Path) -> None:
    result = ludus("train", "--from", "demo")
    assert result.code == 2
    assert "add --set name=NAME" in result.err


def test_a_branch_does_not_replace_a_run(ludus: RunCli, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "notes.txt").write_text("mine")
    result = ludus("train", "--from", "demo", "--set", "name=other")
    assert result.code == 2
    assert "'runs/other' has files" in result.err
    assert [path.name for path in (tmp_path / "runs" / "other").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "demo@3"), f"no checkpoint '3'; it has {EARLY}, {LATE}"),
        (("--from", "demo@last"), "no checkpoint 'last'; it has 2, 4, and 'latest'"),
        (("--from", "dmeo"), "there is no run 'dmeo'; 'runs' has demo"),
        (("--from", "demo", "--resume"), "remove CONFIG, --resume and --overwrite"),
        (("--from", "demo", "--overwrite"), "remove CONFIG, --resume and --overwrite"),
        (("run.toml", "--from", "demo"), "remove CONFIG, --resume and --overwrite"),
        (("--from", "demo", "--set", "learner.learning_rat=1"), "did you mean 'learning_rate'?"),
    ],
)
def test_a_wrong_branch_is_refused_before_anything_is_written(
    ludus: RunCli, run_folder: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = ludus("train", *arguments, "--set", "name=other")
    assert result.code == 2
    assert message in result.err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo"]


def test_a_dry_run_of_a_branch_writes_nothing(
    ludus: RunCli, run_folder: Path, tmp_path: Path
) -> None:
    result = ludus("train", "--from", "demo", "--set", "name=other", "--dry-run")
    assert result.code == 0
    assert "folder       runs/other\n" in result.out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo"]


def test_a_branch_that_the_trainer_refuses_writes_nothing(
    ludus: RunCli, run_folder: Path, use_fake_trainer: Callable[[str], None], tmp_path: Path
) -> None:
    use_fake_trainer("refuses")
    result = ludus("train", "--from", "demo", "--set", "name=other")
    assert result.code == 2
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo"]

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import RunCli
from tests.controller.trained_run import make_original_model, make_trained_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_original_model(tmp_path_factory.mktemp("original"))


@pytest.fixture
def run_folder(original: Path, ludus: RunCli, tmp_path: Path) -> Path:
    return make_trained_run(original, tmp_path / "runs" / "demo")


def test_export_writes_a_model_by_the_name_of_its_run(
    ludus: RunCli, run_folder: Path, tmp_path: Path
) -> None:
    result = ludus("export", "demo", "models/demo", "--dtype", "float16")
    assert result.code == 0, result.err
    assert result.out.splitlines()[:2] == [
        "models/demo",
        "serve it    vllm serve ./models/demo",
    ]
    names = {path.name for path in (tmp_path / "models/demo").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["demo"]


def test_a_failed_export_leaves_nothing(ludus: RunCli, run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "checkpoints/step-00000002/model/model.safetensors").unlink()
    result = ludus("export", "demo@2", "models/demo")
    assert result.code != 0
    assert "step-00000002" in result.err
    assert list((tmp_path / "models").iterdir()) == []


def test_export_of_an_unknown_step_names_the_steps(
    ludus: RunCli, run_folder: Path, tmp_path: Path
) -> None:
    result = ludus("export", "demo@3", "models/demo")
    assert result.code == 2
    assert "has no checkpoint '3'; it has 2, 4" in result.err
    assert not (tmp_path / "models").exists()


def test_an_exported_model_does_not_hide_the_run_of_its_name(
    ludus: RunCli, run_folder: Path, tmp_path: Path
) -> None:
    assert ludus("export", "demo@2", "demo").code == 0
    assert ludus("export", "demo", "again").code == 0
    assert "weights of step 4" in (tmp_path / "again/README.md").read_text()


def test_export_keeps_a_folder_with_files(ludus: RunCli, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    result = ludus("export", "demo", "taken")
    assert result.code == 2
    assert "'taken' has files" in result.err
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes.txt"]


def test_export_of_an_unknown_run_names_similar_runs(ludus: RunCli, run_folder: Path) -> None:
    result = ludus("export", "dmeo", "models/demo")
    assert result.code == 2
    assert "there is no run 'dmeo'; 'runs' has demo" in result.err

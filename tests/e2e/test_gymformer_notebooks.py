"""Gymformer's notebooks run from the first to the last cell, with few episodes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ludus.trainer.reward_model import load_reward_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("shared_ray"),
]

GYMFORMER_FOLDER = Path(__file__).parents[2] / "examples" / "gymformer"
NUM_EPISODES = 16


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all notebooks share."""
    return tmp_path_factory.mktemp("runs")


def execute_notebook(name: str, runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Execute the notebook; return the output of its cells."""
    monkeypatch.setenv("GYMFORMER_RUNS", str(runs_folder))
    monkeypatch.setenv("GYMFORMER_EPISODES", str(NUM_EPISODES))
    monkeypatch.setenv("GYMFORMER_COMPARISONS", "160")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    notebook = nbformat.read(GYMFORMER_FOLDER / name, as_version=4)
    resources = {"metadata": {"path": GYMFORMER_FOLDER}}
    NotebookClient(notebook, timeout=540, kernel_name="python3", resources=resources).execute()
    outputs = [cell_output for cell in notebook.cells for cell_output in cell.get("outputs", ())]
    return "".join(cell_output.get("text", "") for cell_output in outputs)


@pytest.mark.long
def test_classic_notebook_saves_agents_and_plays_an_agent(
    runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed_text = execute_notebook("classic.ipynb", runs_folder, monkeypatch)
    assert "mean return of 20 episodes" in printed_text
    assert list((runs_folder / "classic").iterdir())


@pytest.mark.long
def test_cot_notebook_evaluates_before_and_after_training(
    runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed_text = execute_notebook("cot.ipynb", runs_folder, monkeypatch)
    assert printed_text.count("mean reward") == 2
    assert (runs_folder / "Sums-v0" / "summary.json").is_file()


@pytest.mark.long
def test_reward_model_and_rlhf_notebooks_run_in_sequence(
    runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "epoch 18   accuracy" in execute_notebook("reward_model.ipynb", runs_folder, monkeypatch)
    assert load_reward_model(runs_folder / "reward_model") is not None
    printed_text = execute_notebook("rlhf.ipynb", runs_folder, monkeypatch)
    assert printed_text.count("divergence from the start") == 2, (
        "the divergence was not printed twice"
    )
    assert (runs_folder / "Pleasing-v0" / "summary.json").is_file()

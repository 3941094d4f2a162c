"""The tutorial notebook, executed with settings for a short run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.openspiel.test_server import RunningServer, run_server_program

TUTORIAL_FOLDER = Path(__file__).parents[2] / "examples" / "tutorial"
NOTEBOOK_PATH = TUTORIAL_FOLDER / "blackjack.ipynb"
SHORT_RUN_OVERRIDES = (
    "local_batch_size=64",
    "rollout_threads=16",
    "ludus.model.warm_start_games=256",
    "ludus.learner.num_minibatches=2",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server_program(
        tmp_path_factory.mktemp("server"), OPENSPIEL_GAME="blackjack"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server_program(
        tmp_path_factory.mktemp("other"), OPENSPIEL_GAME="tic_tac_toe"
    ) as server:
        yield server


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("shared_ray")
def test_tutorial_notebook_runs_from_first_to_last_cell(
    server: RunningServer,
    other_server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUTORIAL_SERVER", server.http_address)
    monkeypatch.setenv("TUTORIAL_OTHER_SERVER", other_server.http_address)
    monkeypatch.setenv("TUTORIAL_STEPS", "2")
    monkeypatch.setenv("TUTORIAL_GAMES", "200")
    monkeypatch.setenv("TUTORIAL_RUNS", str(tmp_path))
    monkeypatch.setenv("TUTORIAL_OVERRIDES", " ".join(SHORT_RUN_OVERRIDES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    notebook = nbformat.read(NOTEBOOK_PATH, as_version=4)
    NotebookClient(
        notebook,
        timeout=540,
        kernel_name="python3",
        resources={"metadata": {"path": TUTORIAL_FOLDER}},
    ).execute()
    assert (tmp_path / "blackjack" / "summary.json").is_file()
    transcripts = (tmp_path / "blackjack" / "transcripts.jsonl").read_text().splitlines()
    term_names = {name for transcript in transcripts for name in json.loads(transcript)["terms"]}
    assert term_names == {"evaluate_response"}

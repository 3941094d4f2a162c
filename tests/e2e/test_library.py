"""`Trainer` in a program that starts Ray, configures logging and uses a thread itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.proto.runs import CONFIG_FILE, SUMMARY_FILE, read_traces, read_transcripts
from tests.e2e.runs import start_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.usefixtures("shared_ray")
def test_program_trains_step_by_step_and_resumes_after_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.e2e.library_program", str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert completed.returncode == 0, completed.stderr
    output = json.loads(completed.stdout.splitlines()[-1])
    assert len(output["before"]) == 3 and set(output["before"]) <= {"HIT", "STAND"}
    assert output["greedy"][0] == output["greedy"][1]
    assert (output["steps while paused"], output["saved"]) == (1, "step-00000001")
    assert output["games"] == 20
    assert (output["steps"], output["raised"]) == ([1, 2], True)
    assert output["terms"] == ["reward_term.brevity", "reward_term.environment"]
    assert output["transcripts"] > 0
    assert "cannot save while training runs" in output["refused"]
    assert (output["finished"], output["num_steps"]) == (True, 4)
    assert all(output[key] for key in ("ray stays", "ray is free", "logging stays", "signals stay"))
    folder = tmp_path / "run"
    assert (folder / SUMMARY_FILE).is_file()
    assert {transcript.step for transcript in read_transcripts(folder)} == {1, 2, 3, 4}
    assert [trace.step for trace in read_traces(folder)] == [1, 2, 3, 4]
    assert all(trace.train_s > 0 for trace in read_traces(folder))
    assert any(trace.plays for trace in read_traces(folder))
    assert '"given:brevity_2"' in (folder / CONFIG_FILE).read_text()
    with start_run(tmp_path, flags=("--resume",), config=folder / CONFIG_FILE) as run:
        assert run.process.wait(300) == 2
        assert "'given:brevity_2': this function was passed by the program that started" in (
            run.output()
        )


@pytest.mark.long
@pytest.mark.usefixtures("shared_ray")
def test_a_program_without_async_trains_stops_and_resumes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.e2e.sync_program", str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert completed.returncode == 0, completed.stderr
    output = json.loads(completed.stdout.splitlines()[-1])
    assert len(output["before"]) == 3 and set(output["before"]) <= {"HIT", "STAND"}
    assert (output["first step"], output["saved"]) == (1, "step-00000001")
    assert (output["games"], output["second step"]) == (20, 2)
    assert set(output["columns"].values()) == {2}
    assert {"step", "num_games_trained", "elapsed_s", "reward_mean"} <= output["columns"].keys()
    # The interrupt ends the loop; the run stops with a checkpoint, and resumes.
    assert "not interrupted" not in output
    assert (output["finished"], output["num_steps"]) == (True, 4)
    assert {"SyncTrainer", "Trainer", "train", "LanguageModelRun"} <= set(output["names"])
    assert "run:" in completed.stderr and "4/4" in completed.stderr

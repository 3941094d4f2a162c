"""`ludus train-reward`, which trains a reward model on a file of preferences."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ludus.proto.reward_models import RewardModelMetrics
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow

EXAMPLE_SCRIPT = Path(__file__).parents[2] / "examples/reward_model/make_preferences.py"


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model and the preferences.jsonl of the example."""
    spec = importlib.util.spec_from_file_location("make_preferences", EXAMPLE_SCRIPT)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder = tmp_path_factory.mktemp("example")
    example.write_model(folder / "model", 0)
    rows = [json.dumps(row) + "\n" for row in example.make_comparisons(64, seed=1)]
    (folder / "preferences.jsonl").write_text("".join(rows))
    return folder


def make_options(example_folder: Path, output: Path) -> list[str]:
    preferences, model = (str(example_folder / "preferences.jsonl"), str(example_folder / "model"))
    return [
        "--model",
        model,
        "--data",
        preferences,
        "--output",
        str(output),
        "--set",
        "batch_size=8",
    ]


def test_reward_model_training_stops_and_resumes(example_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "rewards"
    command = [str(Path(sys.executable).parent / "ludus"), "train-reward"]
    command += [*make_options(example_folder, output), "--set", "epochs=12"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    progress_path = output.with_name("rewards.training") / "progress.jsonl"
    while not (progress_path.exists() and '"finished":{' in progress_path.read_text()):
        assert process.poll() is None, "training exited before it finished an epoch"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130
    assert "continue with the same command and --resume" in stderr
    assert not output.exists()
    assert list(progress_path.parent.glob("checkpoints/step-*/state.json"))
    resume_result = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert resume_result.returncode == 0, resume_result.stderr
    assert "epoch 11/12" in resume_result.stderr
    assert f'rewards = [{{kind = "model", path = "{output}"}}]' in resume_result.stdout
    metrics = RewardModelMetrics.model_validate_json((output / "metrics.json").read_text())
    assert [epoch.epoch for epoch in metrics.epochs] == list(range(1, 13))
    assert not progress_path.parent.exists()


def test_invalid_row_exits_with_2_and_reports_the_line(
    ludus: RunCli, example_folder: Path, tmp_path: Path
) -> None:
    preferences_path = tmp_path / "preferences.jsonl"
    preferences_path.write_text(
        '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a"}\n'
    )
    arguments = ["--model", str(example_folder / "model"), "--data", str(preferences_path)]
    result = ludus("train-reward", *arguments, "--dry-run")
    assert result.code == 2
    assert "preferences.jsonl, row 2: the row needs columns prompt, chosen, rejected" in result.err
    assert "Traceback" not in result.err


def test_fields_are_checked_before_anything_starts(ludus: RunCli) -> None:
    result = ludus("train-reward", "--set", "learning_rat=1", "--set", "epochs=0")
    assert result.code == 2
    for text in ("model: required", "data: required", "did you mean 'learning_rate'", "got 0"):
        assert text in result.err

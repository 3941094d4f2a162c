"""Forge's API trains a model in two parts or in one call, with custom functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from ludus.proto.runs import read_transcripts
from tests.forge.tutorial_config import tutorial_config
from tests.openspiel.test_server import RunningServer, run_server_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("shared_ray")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server_program(
        tmp_path_factory.mktemp("server"), OPENSPIEL_GAME="blackjack"
    ) as server:
        yield server


@pytest.mark.long
def test_training_in_two_parts_equals_uninterrupted_training(
    tmp_path: Path, server: RunningServer
) -> None:
    command = [sys.executable, "-m", "tests.e2e.forge_program", str(tmp_path), server.http_address]
    completed_process = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=800
    )
    assert completed_process.returncode == 0, completed_process.stderr
    output: dict[str, Any] = json.loads(completed_process.stdout.splitlines()[-1])
    first_results, second_results = output["results"]
    assert (first_results["iterations"], second_results["iterations"]) == ([1, 2, 3], [4, 5, 6])
    assert all(len(first_results[name]) == 3 for name in ("win_rates", "losses", "rewards"))
    assert output["max_weight_difference"] == 0.0
    complete_results = output["whole"]
    for name in ("iterations", "win_rates", "losses", "rewards"):
        assert first_results[name] + second_results[name] == complete_results[name]
    assert output["versions"] == [3, 3, 3]
    assert output["repeated_texts"] == output["texts"]
    assert set(output["texts"]) <= {"HIT", "STAND"}
    assert all(num_tokens == num_logprobs for num_tokens, num_logprobs in output["tokens"])
    assert output["summary"] and "all 6 steps are trained" in output["refused"]
    # A policy that always stands wins 38.35 % of games and draws 4.96 %. The rewards are 2 for a
    # win, 0.5 for a draw and -1 for a loss, so reward = 3 * win_rate + 1.5 * draw_rate - 1.
    win_rate, reward = (fmean(output["stand"][name]) for name in ("win_rates", "rewards"))
    draw_rate = (reward + 1 - 3 * win_rate) / 1.5
    assert abs(win_rate - 0.3835) < 0.06 and 0.01 < draw_rate < 0.1
    terms = {
        name for transcript in read_transcripts(tmp_path / "parts") for name in transcript.terms
    }
    assert terms == {"evaluate_response"}


@pytest.mark.long
def test_tutorial_configuration_trains_a_tiny_model(tmp_path: Path, server: RunningServer) -> None:
    path = tmp_path / "blackjack.yaml"
    path.write_text(yaml.safe_dump(tutorial_config()))
    overrides = [
        "model=tiny",
        "trainer.training.steps=2",
        f"blackjack_env.server_url={server.http_address}",
        f"ludus.output_dir={tmp_path}",
        "ludus.model.warm_start_games=128",
        "ludus.eval.num_games=50",
    ]
    command = [sys.executable, "-m", "ludus.trainer.compat.forge", "--config", str(path)]
    completed_process = subprocess.run(
        [*command, *overrides],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        env={**os.environ, "WANDB_API_KEY": ""},
    )
    assert completed_process.returncode == 0, completed_process.stderr
    folder = Path(completed_process.stdout.splitlines()[-1])
    assert folder == tmp_path / "blackjack"
    assert json.loads((folder / "summary.json").read_text())["finished"]
    assert "metric_logging.wandb.group" in completed_process.stderr, (
        "the unused key was not reported"
    )
    assert any((folder / "wandb").iterdir()), "the offline log is missing"

"""A run that trains in several environments, each with a separate server."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import Run, find_processes, start_run, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

GAMES = {
    "cards": {"options": {"game": "blackjack"}, "weight": 3.0},
    "ball": {"options": {"game": "catch"}, "weight": 1.0},
}


@pytest.fixture
def mixed_config_path(tmp_path: Path) -> Path:
    """Write a configuration with two games of weight 3 and 1, and return its path."""
    path = tmp_path / "mixed.json"
    config_fields = {
        "environments": GAMES,
        "model": {"width": 64, "num_heads": 2, "max_tokens": 512, "warm_start_games": 256},
        "rollout": {"group_size": 4, "max_completion_tokens": 8, "num_groups_in_flight": 32},
        "algorithm": {"zero_variance_groups": "keep"},
        "training": {"num_steps": 100_000, "groups_per_step": 16},
        "eval": {"num_games": 50, "num_games_during": 50, "every_steps": 100_000},
    }
    path.write_text(json.dumps(config_fields))
    return path


def test_mixed_run_follows_game_weights_and_restarts_only_the_dead_server(
    mixed_config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TEST_RUN", str(tmp_path))
    with start_run(tmp_path, config=mixed_config_path) as run:
        run.wait_until(lambda: run.last_step >= 2)
        server_pids = {
            name: pid
            for pid, command in find_processes(str(tmp_path)).items()
            for name, game in (("cards", "blackjack"), ("ball", "catch"))
            if " ludus.env " in command and game in command
        }
        os.kill(server_pids["ball"], signal.SIGKILL)
        run.wait_until(lambda: count_restarts(run) > 0)
        kill_step = run.last_step
        run.wait_until(lambda: run.last_step >= kill_step + 4)
        run.stop()
    assert {row.environment for row in run.rows if row.kind == "eval"} == {"cards", "ball"}
    assert count_restarts(run) == 1
    rows = [row for row in run.rows if row.kind == "environment"]
    num_groups_by_game = {
        name: sum(
            row.values.get("num_groups_trained", 0) for row in rows if row.environment == name
        )
        for name in GAMES
    }
    assert sum(num_groups_by_game.values()) == 16 * run.last_step
    num_card_groups = num_groups_by_game["cards"]
    assert num_card_groups == pytest.approx(12 * run.last_step, abs=8), num_groups_by_game
    for name in GAMES:
        assert (run.folder / f"environment-{name}.log").exists()
    wait_until_gone(str(tmp_path))


def count_restarts(run: Run) -> float:
    """Return the number of environment servers that the run restarted."""
    return sum(row.values.get("num_environment_restarts", 0) for row in run.rows)

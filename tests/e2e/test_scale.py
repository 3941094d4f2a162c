"""Rollout workers that join and leave while a run continues."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ludus.proto.config import load_run_config
from ludus.proto.runs import CONFIG_FILE, CONTROL_FILE
from tests.e2e.runs import EXAMPLE, SMALL_RUN, Run, find_processes, start_run, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]


def scale_workers(folder: Path, num_workers: int) -> subprocess.CompletedProcess[str]:
    """Run `ludus scale` and return the completed process."""
    command = [sys.executable, "-c", "from ludus.services.cli.app import main; main()"]
    return subprocess.run(
        [*command, "scale", str(folder), "--workers", str(num_workers)],
        capture_output=True,
        text=True,
        timeout=300,
    )


def count_workers(run: Run) -> int:
    """Return the number of workers that received the latest weights."""
    return [len(row.weights) for row in run.rows if row.kind == "weights"][-1]


def count_worker_processes(marker: str) -> int:
    """Return the number of the run's rollout worker processes."""
    return sum("RolloutWorker" in command for command in find_processes(marker).values())


def test_workers_join_and_leave_while_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TEST_RUN", str(tmp_path))
    settings = ("training.num_steps=100000", "eval.num_games_during=0")
    with start_run(tmp_path, *settings, "rollout.num_workers=2", "rollout.min_workers=1") as run:
        run.wait_until(lambda: run.last_step >= 1)
        run.wait_until(lambda: count_workers(run) == 2)
        assert scale_workers(run.folder, 3).returncode == 0
        run.wait_until(lambda: count_workers(run) == 3)
        assert scale_workers(run.folder, 1).returncode == 0
        run.wait_until(
            lambda: count_workers(run) == 1 and count_worker_processes(str(tmp_path)) == 1
        )
        scale_step = run.last_step
        run.wait_until(lambda: run.last_step >= scale_step + 3)
        run.stop()
    num_lost = sum(row.values["num_episodes_lost"] for row in run.rows if row.kind == "train")
    assert num_lost == 0, "a worker that left lost episodes"
    wait_until_gone(str(tmp_path))


@pytest.mark.parametrize(
    ("num_workers_requested", "message"),
    [(0, "greater than or equal to 1"), (1, "rollout.min_workers = 2"), (100, "max_sessions")],
)
def test_invalid_number_of_workers_is_refused_with_a_remedy(
    tmp_path: Path, num_workers_requested: int, message: str
) -> None:
    settings = [*SMALL_RUN, "rollout.min_workers=2", "rollout.num_workers=2"]
    config = load_run_config(EXAMPLE, settings)
    (tmp_path / CONFIG_FILE).write_text(config.model_dump_json())
    completed = scale_workers(tmp_path, num_workers_requested)
    assert completed.returncode == 2
    assert message in completed.stderr
    assert not (tmp_path / CONTROL_FILE).exists()

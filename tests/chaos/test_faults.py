"""Tests of runs in which a process dies: they recover and count every episode."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from upstream_s3_server import running_s3_server

from tests.chaos.faults import (
    ENVIRONMENT_SERVER,
    LEARNER_RANK,
    ROLLOUT_WORKER,
    count_episodes,
    find_pids,
    freeze_and_kill,
    kill_process,
    move_folder_away,
    read_final_state,
    read_log,
)
from tests.e2e.runs import Run, start_run, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

OUTAGE_S = 3.0
NUM_STEPS = 10

SETTINGS = (
    f"training.num_steps={NUM_STEPS}",
    "training.groups_per_step=64",
    "training.checkpoint_every_steps=3",
    "rollout.num_groups_in_flight=64",
    "learner.num_minibatches=1",
    "eval.num_games=200",
    "eval.num_games_during=0",
    "weights.kind=folder",
    "weights.keep_versions=2",
)
ENDLESS_SETTING = "training.num_steps=100000"
"""Setting for runs that the test stops."""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Mark the processes of the test's runs with an environment variable; return its value."""
    monkeypatch.setenv("LUDUS_TEST_RUN", str(tmp_path))
    return str(tmp_path)


def wait_for_steps(run: Run, num_steps: int = 2) -> None:
    """Wait until the run has trained `num_steps` more steps."""
    target_step = run.last_step + num_steps
    run.wait_until(lambda: run.last_step >= target_step)


def read_trained_steps(run: Run) -> list[int]:
    """Return the numbers of the trained steps in the metrics."""
    return [row.step for row in run.rows if row.kind == "train"]


def test_worker_server_and_store_outages_lose_only_episodes_in_flight(
    tmp_path: Path, marker: str
) -> None:
    with start_run(tmp_path, *SETTINGS, ENDLESS_SETTING) as run:
        run.wait_until(lambda: run.last_step >= 2)
        freeze_and_kill(find_pids(marker, ROLLOUT_WORKER)[0])
        wait_for_steps(run)
        [server] = find_pids(marker, ENVIRONMENT_SERVER)
        freeze_and_kill(server)
        wait_for_steps(run)
        restore_thread = move_folder_away(run.folder / "weights", OUTAGE_S)
        wait_for_steps(run)
        restore_thread.join()
        run.stop()
    state = read_final_state(run)
    assert read_trained_steps(run) == list(range(1, state.step + 1))
    assert state.environment_restarts == 1
    published_step = state.weight_syncs - 1
    assert published_step in (state.step - 1, state.step), "a stop skips only the last delivery"
    assert state.canary_failures == 0
    assert state.max_staleness_seen <= 1
    versions = sorted(path.name[:9] for path in (run.folder / "weights").iterdir())
    assert versions == [f"v{published_step - 1:08d}", f"v{published_step:08d}"]
    counts = count_episodes(run)
    assert counts.is_balanced(), counts
    assert state.games_played == sum_episode_metric(run)
    num_in_flight = 2 * 64 * 4
    assert 0 < counts.num_lost <= 2 * num_in_flight, "wrong number of lost episodes"
    assert state.games_trained <= state.games_played - state.episodes_lost
    assert "starting another" in read_log(run)
    wait_until_gone(marker)


def sum_episode_metric(run: Run) -> int:
    """Return the total number of episodes in the metrics."""
    return int(sum(row.values["num_episodes"] for row in run.rows if row.kind == "train"))


def test_bucket_outage_only_delays_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_s3_server(tmp_path / "s3") as server:
        for name, value in server.credentials.items():
            monkeypatch.setenv(name, value)
        bucket_settings = (f"weights.bucket={server.bucket}", f"weights.endpoint={server.endpoint}")
        settings = (*SETTINGS, "weights.kind=s3", "weights.full_every=4", *bucket_settings)
        with start_run(tmp_path, *settings) as run:
            run.wait_until(lambda: run.last_step >= 3)
            server.kill()
            time.sleep(OUTAGE_S)
            server.start()
            summary = run.finish()
        assert server.credentials["AWS_SECRET_ACCESS_KEY"] not in read_log(run)
    assert read_trained_steps(run) == list(range(1, NUM_STEPS + 1))
    assert (summary.episodes_lost, summary.canary_failures) == (0, 0)
    counts = count_episodes(run)
    assert counts.is_balanced(), counts


def test_run_continues_from_checkpoint_after_learner_rank_is_killed(
    tmp_path: Path, marker: str
) -> None:
    with start_run(tmp_path, *SETTINGS, ENDLESS_SETTING, "learner.num_ranks=2") as run:
        run.wait_until(lambda: run.last_step >= 5)
        kill_process(find_pids(marker, LEARNER_RANK)[1])
        run.wait_until(lambda: "training continues from the checkpoint" in read_log(run))
        wait_for_steps(run, 4)
        run.stop()
    state = read_final_state(run)
    assert read_trained_steps(run) == list(range(1, state.step + 1)), (
        "steps are missing or repeated"
    )
    assert (state.learner_restarts, state.canary_failures) == (1, 0)
    game_counts = [row.num_games_trained for row in run.rows if row.kind == "train"]
    assert game_counts == sorted(set(game_counts))
    assert state.games_trained <= state.games_played - state.episodes_lost
    wait_until_gone(marker)


def test_killed_driver_leaves_no_process_and_the_run_can_resume(
    tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seconds for which Ray's agents try to reach a lost head node. The default is 60.
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    with start_run(tmp_path, *SETTINGS) as run:
        run.wait_until(lambda: run.last_step >= 5)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait(60)
        wait_until_gone(marker)
    with start_run(tmp_path, *SETTINGS, flags=("--resume",)) as run:
        summary = run.finish()
    assert summary.finished
    assert read_trained_steps(run) == list(range(1, NUM_STEPS + 1)), "steps are missing or repeated"
    assert summary.canary_failures == 0
    counts = count_episodes(run)
    assert counts.is_balanced(), counts

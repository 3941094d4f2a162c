"""Whole runs: real server, real Ray, real gloo; killed, stopped, resumed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ludus.services.cli.trainer_process import STOP_GRACE_S
from tests.e2e.runs import processes_of, start_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def server_pid(marker: str) -> int:
    """The process id of the run's environment server."""
    [pid] = [p for p, command in processes_of(marker).items() if " ludus.env " in command]
    return pid


def test_a_killed_environment_server_costs_only_the_episodes_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TEST_RUN", str(tmp_path))
    with start_run(
        tmp_path, "training.num_steps=12", "weights.kind=folder", "weights.keep_versions=2"
    ) as run:
        run.wait_until(lambda: run.last_step >= 3)
        server = server_pid(str(tmp_path))
        # Frozen first, so that games are under way or about to begin when it dies.
        os.kill(server, signal.SIGSTOP)
        time.sleep(1)
        os.kill(server, signal.SIGKILL)
        summary = run.finish()
    assert summary.finished
    assert summary.environment_restarts == 1
    # A group that was about to begin waits for the server, and loses nothing.
    assert summary.episodes_lost <= 32 * 4, "only what was in flight"
    assert summary.games_trained <= summary.games_played - summary.episodes_lost
    assert summary.weight_syncs == 13
    assert (summary.canary_failures, summary.max_staleness_seen <= 1) == (0, True)
    kept = sorted(path.name[:9] for path in (run.folder / "weights").iterdir())
    assert kept == ["v00000011", "v00000012"]


def test_a_killed_rollout_worker_is_replaced_and_its_groups_are_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TEST_RUN", str(tmp_path))
    with start_run(tmp_path, "training.num_steps=12") as run:
        run.wait_until(lambda: run.last_step >= 3)
        [pid] = [p for p, name in processes_of(str(tmp_path)).items() if "RolloutWorker" in name]
        os.kill(pid, signal.SIGKILL)
        summary = run.finish()
    assert summary.finished
    assert summary.canary_failures == 0
    steps = [row.step for row in run.rows if row.kind == "train"]
    assert steps == list(range(1, 13))


def test_ctrl_c_leaves_a_checkpoint_and_no_process_and_the_run_continues_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TEST_RUN", str(tmp_path))
    settings = ("learner.num_ranks=2", "training.num_steps=10")
    with start_run(tmp_path, "training.num_steps=1000", settings[0]) as run:
        run.wait_until(lambda: run.last_step >= 3)
        began = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(20) == 130
        assert time.monotonic() - began < STOP_GRACE_S, "then the command line would kill it"
        stopped_at = run.last_step
    assert processes_of(str(tmp_path)) == {}
    checkpoints = list((run.folder / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == [f"step-{stopped_at:08d}"]

    with start_run(
        tmp_path, settings[0], f"training.num_steps={stopped_at + 3}", flags=("--resume",)
    ) as run:
        summary = run.finish()
    assert (summary.num_steps, summary.num_learner_ranks) == (stopped_at + 3, 2)
    steps = [row.step for row in run.rows if row.kind == "train"]
    assert steps == list(range(1, stopped_at + 4)), "each step is there once"
    games = [row.num_games_trained for row in run.rows if row.kind == "train"]
    assert games == sorted(set(games))
    assert processes_of(str(tmp_path)) == {}


def test_vllm_samples_from_the_weights_of_the_learner_after_every_sync(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM has no wheel for this machine")
    with start_run(tmp_path, "generator.kind=vllm") as run:
        summary = run.finish()
    assert summary.generator == "vllm"
    assert summary.weight_syncs == 7
    assert 0 < summary.canary_max_error < 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["environment.package=blakjack_env"], "no environment package 'blakjack_env'"),
        (["environment.options.game=blackjak"], "blackjak"),
        (["environment.kind=remote", "environment.address=grpc://127.0.0.1:9"], "127.0.0.1:9"),
        (["model.kind=pretrained", "model.path=./no-such-model"], "./no-such-model"),
        (['environment.baselines=["card_counter"]'], "card_counter"),
        (["environment.policy_chart=openspiel_env.policy_chart:nothing"], "nothing"),
    ],
)
def test_bad_input_ends_with_one_message_and_leaves_nothing(
    tmp_path: Path, settings: list[str], message: str
) -> None:
    with start_run(tmp_path, "environment.options={}", *settings) as run:
        assert run.process.wait(90) == 2
        output = run.output()
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in output
    assert not run.folder.exists()


def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path: Path) -> None:
    with start_run(tmp_path, "training.num_steps=1") as run:
        run.finish()
    state = next((run.folder / "checkpoints").iterdir()) / "state.json"
    state.write_text(state.read_text()[:50])
    with start_run(tmp_path, flags=("--resume",)) as run:
        assert run.process.wait(60) == 2
        output = run.output()
    assert "cannot be read" in output
    assert "--overwrite" in output

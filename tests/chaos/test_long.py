"""Comparison of a normal blackjack run with a run in which every process dies several times.

Both runs use the example with two rollout workers, two learner ranks and a weight store in a
folder. The disturbed run must finish, count its lost episodes, and learn as well as the normal
run. The numbers are written to bench/results/chaos.json.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ludus.proto.runs import Summary
from tests.chaos.faults import (
    ENVIRONMENT_SERVER,
    LEARNER_RANK,
    ROLLOUT_WORKER,
    find_pids,
    freeze_and_kill,
    kill_process,
    move_folder_away,
    read_log,
)
from tests.e2e.runs import EXAMPLE, Run, start_run, wait_until_gone

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "chaos.json"
NUM_ROUNDS = 2
FIRST_STEP, STEPS_BETWEEN_FAULTS = 15, 12
OUTAGE_S = 30.0
STEP_TIMEOUT_S = 900.0
SETTINGS = (
    "rollout.num_workers=2",
    "rollout.num_groups_in_flight=256",
    "learner.num_ranks=2",
    "weights.kind=folder",
    "training.checkpoint_every_steps=10",
    "training.max_learner_restarts=10",
    "eval.num_games_during=0",
)


@dataclass
class Fault:
    """A fault to inject."""

    name: str
    inject: Callable[[Run, str], None]


@dataclass
class FaultLog:
    """The faults that were injected into a run."""

    faults: list[dict[str, float | str]] = field(default_factory=list)
    start_s: float = field(default_factory=time.monotonic)

    def record(self, name: str, step: int) -> None:
        """Add a fault, with the seconds since the start."""
        elapsed_s = round(time.monotonic() - self.start_s, 1)
        self.faults.append({"fault": name, "step": step, "at_s": elapsed_s})


def kill_worker(run: Run, marker: str) -> None:
    run.wait_until(lambda: len(find_pids(marker, ROLLOUT_WORKER)) > 0, STEP_TIMEOUT_S)
    freeze_and_kill(find_pids(marker, ROLLOUT_WORKER)[0])


def kill_server(run: Run, marker: str) -> None:
    freeze_and_kill(find_pids(marker, ENVIRONMENT_SERVER)[0])


def kill_rank(run: Run, marker: str) -> None:
    num_restarts = read_log(run).count("training continues from the checkpoint")
    kill_process(find_pids(marker, LEARNER_RANK)[-1])
    run.wait_until(
        lambda: read_log(run).count("training continues from the checkpoint") > num_restarts,
        STEP_TIMEOUT_S,
    )


def move_store_away(run: Run, marker: str) -> None:
    move_folder_away(run.folder / "weights", OUTAGE_S).join()


FAULTS = (
    Fault("rollout worker killed", kill_worker),
    Fault("environment server killed", kill_server),
    Fault("weight store unavailable", move_store_away),
    Fault("learner rank killed", kill_rank),
)


def test_run_with_faults_learns_as_well_as_a_normal_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TEST_RUN", str(tmp_path))
    marker = str(tmp_path)
    with start_run(tmp_path / "alone", *SETTINGS, config=EXAMPLE) as run:
        normal_summary = run.finish(timeout_s=1500)
    summary, fault_log, run = run_with_faults(tmp_path / "disturbed", marker)
    wait_until_gone(marker)
    min_return, max_return = normal_summary.expected_return_ci95
    write_results(normal_summary, summary, fault_log)
    steps = [row.step for row in run.rows if row.kind == "train"]
    assert steps == list(range(1, normal_summary.num_steps + 1)), "steps are missing or repeated"
    assert summary.canary_failures == 0
    assert summary.max_staleness_seen <= 1
    assert summary.episodes_lost > 0
    assert summary.games_trained <= summary.games_played - summary.episodes_lost
    assert min_return <= summary.expected_return <= max_return, (
        min_return,
        summary.expected_return,
        max_return,
    )


def run_with_faults(folder: Path, marker: str) -> tuple[Summary, FaultLog, Run]:
    """Train with all faults, and kill the driver at the end of each round."""
    fault_log, flags = FaultLog(), ()
    target_step = FIRST_STEP
    for _ in range(NUM_ROUNDS):
        with start_run(folder, *SETTINGS, flags=flags, config=EXAMPLE) as run:
            for fault in FAULTS:
                run.wait_until(
                    lambda target_step=target_step: run.last_step >= target_step, STEP_TIMEOUT_S
                )
                fault_log.record(fault.name, run.last_step)
                fault.inject(run, marker)
                target_step = run.last_step + STEPS_BETWEEN_FAULTS
            run.wait_until(
                lambda target_step=target_step: run.last_step >= target_step, STEP_TIMEOUT_S
            )
            fault_log.record("driver killed", run.last_step)
            run.process.send_signal(signal.SIGKILL)
            run.process.wait(60)
            wait_until_gone(marker)
        flags = ("--resume",)
        target_step += STEPS_BETWEEN_FAULTS // 2
    with start_run(folder, *SETTINGS, flags=flags, config=EXAMPLE) as run:
        return run.finish(timeout_s=1500), fault_log, run


def write_results(normal_summary: Summary, summary: Summary, fault_log: FaultLog) -> None:
    min_return, max_return = normal_summary.expected_return_ci95
    results = {
        "what": "examples/blackjack/tiny.toml, with and without faults; `make chaos`",
        "machine": describe_machine(),
        "versions": normal_summary.versions,
        "settings": list(SETTINGS),
        "faults": fault_log.faults,
        "alone": select_results(normal_summary),
        "disturbed": select_results(summary),
        "disturbed_inside_interval_of_alone": min_return <= summary.expected_return <= max_return,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def describe_machine() -> dict[str, object]:
    """Return the operating system, CPU and number of cores."""
    return {"system": platform.platform(), "cpu": _read_cpu_name(), "num_cores": os.cpu_count()}


def select_results(summary: Summary) -> dict[str, object]:
    """Return the fields of a summary that are written to the results."""
    field_names = {
        *("seed", "num_steps", "games_trained", "games_played", "episodes_lost", "episodes_failed"),
        *("expected_return", "expected_return_ci95", "win_rate", "gap_closed", "gap_closed_ci95"),
        "environment_restarts",
        *("canary_failures", "canary_max_error", "max_staleness_seen", "weight_syncs"),
        *("wall_seconds_training", "wall_seconds_total"),
    }
    return {name: value for name, value in summary.model_dump().items() if name in field_names}


def _read_cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()

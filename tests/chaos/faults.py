"""Fault injection into runs, and counts of the groups and episodes of a finished run.

Processes are found by an environment variable of the run, so other runs are not affected.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ludus.proto.config import LanguageModelRun
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import CONFIG_FILE, LOG_FILE
from ludus.trainer.data.counts import sum_counts
from ludus.trainer.run.checkpoint import RunState, find_newest_checkpoint, read_state
from tests.e2e.runs import Run, find_processes

ROLLOUT_WORKER, LEARNER_RANK, ENVIRONMENT_SERVER = "RolloutWorker", "Learner", " ludus.env "
"""Substrings of the command lines of these processes."""


def find_pids(marker: str, kind: str) -> list[int]:
    """Return the ids of the run's processes of one kind, in ascending order."""
    return sorted(pid for pid, command in find_processes(marker).items() if kind in command)


def kill_process(pid: int) -> None:
    """Send SIGKILL to the process."""
    os.kill(pid, signal.SIGKILL)


def freeze_and_kill(pid: int, suspension_s: float = 1.0) -> None:
    """Suspend the process for `suspension_s` so that calls are pending, then kill the process."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(suspension_s)
    kill_process(pid)


def move_folder_away(folder: Path, duration_s: float) -> threading.Thread:
    """Rename the folder; return a thread that restores the name after `duration_s`."""
    moved_folder = folder.with_name(folder.name + ".away")
    folder.rename(moved_folder)
    thread = threading.Timer(duration_s, lambda: moved_folder.rename(folder))
    thread.start()
    return thread


def read_log(run: Run) -> str:
    """Return the log of the run's driver."""
    path = run.folder / LOG_FILE
    return path.read_text() if path.exists() else ""


@dataclass(frozen=True)
class EpisodeCounts:
    """Counts of the groups and episodes of a finished run."""

    num_groups: int
    """Number of finished groups, whether trained on or not."""
    num_trained: int
    num_buffered: int
    """Number of groups in the buffer of the last checkpoint."""
    num_void: int
    num_stale: int
    num_episodes: int
    num_scored: int
    num_lost: int
    num_failed: int
    group_size: int

    def is_balanced(self) -> bool:
        """Return whether every group and every episode is counted exactly once."""
        num_counted = self.num_trained + self.num_buffered + self.num_void + self.num_stale
        return (
            self.num_groups == num_counted
            and self.num_episodes == self.num_groups * self.group_size
            and self.num_episodes == self.num_scored + self.num_lost + self.num_failed
        )


def read_final_state(run: Run) -> RunState:
    """Return the state of the run's last checkpoint."""
    return read_state(find_newest_checkpoint(run.folder / "checkpoints"), RunState)


def count_episodes(run: Run) -> EpisodeCounts:
    """Count the episodes of a run that keeps zero-variance groups and never lost its learner."""
    config = LanguageModelRun.model_validate_json((run.folder / CONFIG_FILE).read_text())
    state = read_final_state(run)
    pending_counts = sum_counts(state.counts.values())

    def sum_metric(metric: TrainMetric) -> int:
        return int(sum(row.values.get(metric, 0) for row in run.rows if row.kind == "train"))

    return EpisodeCounts(
        num_groups=sum_metric(TrainMetric.NUM_GROUPS) + pending_counts.num_groups,
        num_trained=sum_metric(TrainMetric.NUM_GROUPS_TRAINED),
        num_buffered=len(state.buffered_groups),
        num_void=sum_metric(TrainMetric.NUM_GROUPS_VOID) + pending_counts.num_void_groups,
        num_stale=sum_metric(TrainMetric.NUM_GROUPS_STALE) + pending_counts.num_stale_groups,
        num_episodes=sum_metric(TrainMetric.NUM_EPISODES) + pending_counts.num_episodes,
        num_scored=sum_metric(TrainMetric.NUM_EPISODES_SCORED) + pending_counts.num_scored,
        num_lost=sum_metric(TrainMetric.NUM_EPISODES_LOST) + pending_counts.num_lost,
        num_failed=sum_metric(TrainMetric.NUM_EPISODES_FAILED) + pending_counts.num_failed,
        group_size=config.rollout.group_size,
    )

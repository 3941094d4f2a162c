"""What can go wrong with a run, done to it; and the account of its episodes afterwards.

Processes are found by an environment variable that the run was started with, so nothing that
another run has started is ever touched.
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
from ludus.trainer.data.counts import total
from ludus.trainer.run.checkpoint import RunState, find_newest_checkpoint, read_state
from tests.e2e.runs import Run, processes_of

ROLLOUT_WORKER, LEARNER_RANK, ENVIRONMENT_SERVER = "RolloutWorker", "Learner", " ludus.env "
"""What the command lines of these processes hold."""


def pids(marker: str, kind: str) -> list[int]:
    """The processes of one kind that belong to the run started with `marker`, oldest first."""
    return sorted(pid for pid, command in processes_of(marker).items() if kind in command)


def kill(pid: int) -> None:
    """Kill the process without a word."""
    os.kill(pid, signal.SIGKILL)


def freeze_and_kill(pid: int, frozen_s: float = 1.0) -> None:
    """Kill the process, stopped for a while before: calls to it are surely under way."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(frozen_s)
    kill(pid)


def take_folder_away(folder: Path, away_s: float) -> threading.Thread:
    """The thread that brings the folder back after `away_s`; until then nobody finds it."""
    aside = folder.with_name(folder.name + ".away")
    folder.rename(aside)
    thread = threading.Timer(away_s, lambda: aside.rename(folder))
    thread.start()
    return thread


def log_of(run: Run) -> str:
    """What the run's driver has logged so far."""
    path = run.folder / LOG_FILE
    return path.read_text() if path.exists() else ""


@dataclass(frozen=True)
class Account:
    """Where the groups and episodes of a finished run have gone."""

    num_groups: int
    """That came to an end, well or not."""
    num_trained: int
    num_waiting: int
    """In the last checkpoint."""
    num_void: int
    num_stale: int
    num_episodes: int
    num_scored: int
    num_lost: int
    num_failed: int
    group_size: int

    def is_balanced(self) -> bool:
        """True when every group and every episode has gone to exactly one place."""
        gone = self.num_trained + self.num_waiting + self.num_void + self.num_stale
        return (
            self.num_groups == gone
            and self.num_episodes == self.num_groups * self.group_size
            and self.num_episodes == self.num_scored + self.num_lost + self.num_failed
        )


def state_of(run: Run) -> RunState:
    """Where the run stood when it ended."""
    return read_state(find_newest_checkpoint(run.folder / "checkpoints"), RunState)


def account_of(run: Run) -> Account:
    """The account of a run that keeps zero-variance groups and whose learner was never lost."""
    config = LanguageModelRun.model_validate_json((run.folder / CONFIG_FILE).read_text())
    state = state_of(run)
    rest = total(state.counts.values())

    def added(metric: TrainMetric) -> int:
        return int(sum(row.values.get(metric, 0) for row in run.rows if row.kind == "train"))

    return Account(
        num_groups=added(TrainMetric.NUM_GROUPS) + rest.num_groups,
        num_trained=added(TrainMetric.NUM_GROUPS_TRAINED),
        num_waiting=len(state.buffered_groups),
        num_void=added(TrainMetric.NUM_GROUPS_VOID) + rest.num_void_groups,
        num_stale=added(TrainMetric.NUM_GROUPS_STALE) + rest.num_stale_groups,
        num_episodes=added(TrainMetric.NUM_EPISODES) + rest.num_episodes,
        num_scored=added(TrainMetric.NUM_EPISODES_SCORED) + rest.num_scored,
        num_lost=added(TrainMetric.NUM_EPISODES_LOST) + rest.num_lost,
        num_failed=added(TrainMetric.NUM_EPISODES_FAILED) + rest.num_failed,
        group_size=config.rollout.group_size,
    )

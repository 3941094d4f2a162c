"""Checkpoints: all it takes to continue as if nothing had happened.

    checkpoints/step-00000050/
        learner/     weights, optimizer, random state, one part per rank
        model/       the weights as a Hugging Face folder, for evaluation and for others
        state.json   RunState

A checkpoint is written aside and renamed, so one that has its name is whole.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.proto.errors import CheckpointError
from ludus.proto.runs import PolicyResult
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.mixture import MixtureState
from ludus.trainer.types import GroupSpec, RolloutGroup

_STATE_FILE = "state.json"


class RunState(BaseModel):
    """Where a run stands between two steps."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    """Batches trained on; also the version of the weights."""
    mixture: MixtureState = Field(default_factory=MixtureState)
    """Which groups were begun, and what decides on the next."""
    unfinished_groups: list[GroupSpec] = []
    """Groups that were being played, or about to be; they are played again."""
    buffered_groups: list[RolloutGroup] = []
    """Groups that waited for training."""
    counts: dict[str, RolloutCounts] = {}
    """What was played since the last batch, by environment."""
    games_played: int = 0
    games_trained: int = 0
    episodes_lost: int = 0
    weight_syncs: int = 0
    canary_failures: int = 0
    canary_max_error: float = 0.0
    environment_restarts: int = 0
    learner_restarts: int = 0
    num_groups_rolled_back: int = 0
    """Groups that were trained on, waited or were played when a learner died, and were not in
    the checkpoint that its successor began with."""
    max_staleness_seen: int = 0
    start: dict[str, PolicyResult] = {}
    """The policy before training, by environment, once it was judged there."""

    def go_back_to(self, earlier: RunState) -> None:
        """Go back to where `earlier` stood, in all that follows from training.

        What has happened to episodes, servers and weights has happened all the same.
        """
        self.step = earlier.step
        self.games_trained = earlier.games_trained
        self.unfinished_groups = earlier.unfinished_groups
        self.buffered_groups = earlier.buffered_groups

    def forget_under_way(self) -> None:
        """Forget what waited or was being played: it is in other hands."""
        self.unfinished_groups, self.buffered_groups, self.counts = [], [], {}


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def begin(self, step: int) -> Path:
        """A folder to write the checkpoint of `step` into."""
        aside = self._folder / f"step-{step:08d}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def commit(self, aside: Path, state: RunState) -> Path:
        """The checkpoint, now whole; the oldest beyond those kept are gone."""
        (aside / _STATE_FILE).write_text(state.model_dump_json(), encoding="utf-8")
        target = aside.with_suffix("")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
        for old in list_checkpoints(self._folder)[: -self._keep]:
            shutil.rmtree(old)
        return target

    def newest(self) -> Path | None:
        """The newest whole checkpoint, if there is one."""
        return next(reversed(list_checkpoints(self._folder)), None)


def learner_folder(checkpoint: Path) -> Path:
    """The learner's part of a checkpoint."""
    return checkpoint / "learner"


def model_folder(checkpoint: Path) -> Path:
    """The checkpoint's weights as a Hugging Face folder."""
    return checkpoint / "model"


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix == "")


def newest_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    found = list_checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"no checkpoint in '{folder}'; train first, or name one with --checkpoint"
        )
    return found[-1]


def read_state(checkpoint: Path) -> RunState:
    """Where the run stood.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = checkpoint / _STATE_FILE
    try:
        return RunState.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"checkpoint '{checkpoint}' cannot be read: {path.name}: {reason}; remove its folder "
            "to continue from the one before, or start again with --overwrite"
        ) from error

"""The lifecycle of a run with a run folder: how it starts, resumes and closes.

`core/stopping.py` has the rules for stopping, which the training of reward models shares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from pydantic import ValidationError

from ludus.proto.config import RunConfig, validate_run_json
from ludus.proto.config.changes import Change, changes_between, describe_changes
from ludus.proto.errors import ConfigError, UserError
from ludus.proto.runs import CHECKPOINTS_FOLDER, CONFIG_FILE, Resume
from ludus.trainer.core.output import warn_user
from ludus.trainer.run.checkpoint import (
    CheckpointFolder,
    StateT,
    check_streams,
    find_newest_checkpoint,
    list_checkpoints,
    read_state,
)
from ludus.trainer.run.folder import RunFolder, log_to_folder, run_path
from ludus.trainer.run.metrics_writer import MetricsWriter


@dataclass(frozen=True, slots=True)
class StartPoint(Generic[StateT]):
    """The point from which a run starts or resumes."""

    checkpoint: Path | None
    """Checkpoint to resume from; None for a new run."""
    state: StateT
    changes: list[Change]
    """Changes of the configuration since the run last started."""


def find_start(run: RunConfig, resume: Resume, state_type: type[StateT]) -> StartPoint[StateT]:
    """Return the point from which the run starts; write nothing.

    Raises:
        CheckpointError: there is no checkpoint to resume from, or it does not fit.
        ConfigError: the configuration changed in a way that a resumed run does not allow.
    """
    path = run_path(run)
    checkpoints = path / CHECKPOINTS_FOLDER
    if resume is Resume.NEVER or (resume is Resume.AUTO and not list_checkpoints(checkpoints)):
        return StartPoint(None, state_type(), [])
    checkpoint = find_newest_checkpoint(checkpoints)
    state = read_state(checkpoint, state_type)
    check_streams(checkpoint, state)
    return StartPoint(checkpoint, state, find_config_changes(path, run))


def find_config_changes(path: Path, run: RunConfig) -> list[Change]:
    """Return the changes since the configuration in the run's folder `path`.

    Raises:
        ConfigError: a resumed run does not allow a change, or the old configuration is unreadable.
    """
    try:
        previous_run = validate_run_json((path / CONFIG_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"'{path / CONFIG_FILE}' must contain the configuration that the run started with, but "
            f"cannot be read: {error}; restore the file, or start another run"
        ) from None
    return changes_between(previous_run, run)


@dataclass(slots=True)
class OpenRun(Generic[StateT]):
    """A run whose folder is locked and whose files are open."""

    folder: RunFolder
    metrics: MetricsWriter
    checkpoints: CheckpointFolder
    checkpoint: Path | None
    """Checkpoint that the run resumes from; None for a new run."""
    state: StateT


@contextmanager
def open_run(
    run: RunConfig,
    state_type: type[StateT],
    *,
    resume: Resume,
    overwrite: bool,
    print_rows: bool = False,
) -> Iterator[OpenRun[StateT]]:
    """Open the folder, log and metrics of a run, and close them after the block.

    If a UserError ends a new run before its first step, its folder is removed.

    Args:
        overwrite: replace an existing run of the same name.
        print_rows: also print the rows of metrics on standard output.

    Raises:
        UserError: the run cannot start as configured.
    """
    start = find_start(run, resume, state_type)
    if start.checkpoint is None:
        # An automatic restart replaces a run that stopped before its first checkpoint.
        folder = RunFolder.create(run, overwrite=overwrite or resume is Resume.AUTO)
    else:
        folder = RunFolder.reopen(run)
    try:
        with log_to_folder(folder.path, run.log_level):
            if start.changes:
                changes = describe_changes(start.changes)
                warn_user(f"the run continues with another configuration: {changes}")
            metrics = MetricsWriter(
                run,
                folder.path,
                resume_from=None if start.checkpoint is None else start.state.step,
                job_log=sys.stdout if print_rows else None,
            )
            try:
                checkpoints = CheckpointFolder(folder.checkpoints, run.training.keep_checkpoints)
                yield OpenRun(folder, metrics, checkpoints, start.checkpoint, start.state)
            finally:
                metrics.close()
    except UserError:
        if start.checkpoint is None and start.state.step == 0:
            folder.discard()
        raise
    finally:
        folder.close()

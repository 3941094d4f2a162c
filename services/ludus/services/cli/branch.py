"""`--from RUN[@STEP]`: a new run that continues from a checkpoint of another run.

The new folder gets copies of the checkpoint, of the records up to its step, and of the best
checkpoint up to its step. The other run is only read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.proto.config import RunConfig
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.evaluation_history import read_evaluation_history
from ludus.proto.runs import (
    CHAT_TEMPLATE_FILE,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    INITIAL_MODEL_FOLDER,
    METRICS_FILE,
    SAMPLES_FILE,
    TRACE_FILE,
    TRANSCRIPTS_FILE,
)
from ludus.services.cli.checkpoint_names import list_checkpoints, parse_step
from ludus.services.cli.new_folder import write_new_folder
from ludus.services.cli.run_names import split_run_step

_RECORDS = (METRICS_FILE, TRANSCRIPTS_FILE, SAMPLES_FILE, TRACE_FILE)


@dataclass(frozen=True, slots=True)
class Branch:
    """A checkpoint of an existing run, and the new run that starts from it."""

    origin: Path
    """Folder of the existing run."""
    checkpoint: Path
    config: RunConfig
    """Configuration of the new run."""

    @property
    def folder(self) -> Path:
        """Folder of the new run."""
        return Path(self.config.output_dir) / self.config.name


def plan_branch(origin: str, overrides: Sequence[str]) -> Branch:
    """Return the branch that starts from RUN[@STEP].

    Raises:
        NotFoundError: there is no such run or checkpoint.
        ConfigError: the new run has the name of the existing one, or an override is wrong.
    """
    from ludus.proto.config import load_run_config

    folder, checkpoint = split_run_step(origin)
    if checkpoint is None:
        checkpoint = next(reversed(list_checkpoints(folder)), None)
    if checkpoint is None:
        raise NotFoundError(f"run '{folder}' has no checkpoint to start from")
    branch = Branch(folder, checkpoint, load_run_config(folder / CONFIG_FILE, overrides))
    if branch.folder.resolve() == folder.resolve():
        raise ConfigError(
            f"--from {origin} starts a new run, which needs another name than "
            f"'{branch.config.name}'; add --set name=NAME, or continue the run itself with "
            f"ludus train {folder / CONFIG_FILE} --resume"
        )
    return branch


def write_branch(branch: Branch) -> None:
    """Write the folder of the new run, complete or not at all.

    Raises:
        ConfigError: the folder contains files, or cannot be written.
    """
    step = parse_step(branch.checkpoint)
    with write_new_folder(branch.folder) as (folder, _):
        for checkpoint in {branch.checkpoint, _find_best_checkpoint(branch)}:
            shutil.copytree(checkpoint, folder / CHECKPOINTS_FOLDER / checkpoint.name)
        if (branch.origin / INITIAL_MODEL_FOLDER).is_dir():
            shutil.copytree(branch.origin / INITIAL_MODEL_FOLDER, folder / INITIAL_MODEL_FOLDER)
        if (branch.origin / CHAT_TEMPLATE_FILE).is_file():
            shutil.copyfile(branch.origin / CHAT_TEMPLATE_FILE, folder / CHAT_TEMPLATE_FILE)
        for name in _RECORDS:
            if (branch.origin / name).is_file():
                _copy_records(branch.origin / name, folder / name, step)
        # The trainer reports the changes from this configuration and replaces it.
        shutil.copyfile(branch.origin / CONFIG_FILE, folder / CONFIG_FILE)


def _find_best_checkpoint(branch: Branch) -> Path:
    """Return the best checkpoint up to that of the branch, or that of the branch."""
    step, checkpoints = parse_step(branch.checkpoint), list_checkpoints(branch.origin)
    earlier_checkpoints = {
        parse_step(path): path for path in checkpoints if parse_step(path) <= step
    }
    history = read_evaluation_history(branch.origin)
    history.drop_after(step)
    best_score = history.find_best(earlier_checkpoints)
    return branch.checkpoint if best_score is None else earlier_checkpoints[best_score.step]


def _copy_records(source: Path, target: Path, last_step: int) -> None:
    """Copy the complete lines of a file of records up to a step."""
    with source.open("rb") as old_file, target.open("wb") as new_file:
        for line in old_file:
            if line.endswith(b"\n") and json.loads(line)["step"] <= last_step:
                new_file.write(line)

"""The folder of a reward model's training: its progress and its checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ludus.proto.config import RewardModelConfig
from ludus.proto.errors import CheckpointError, ConfigError, NotFoundError
from ludus.proto.reward_models import (
    CHECKPOINT_FILE,
    METRICS_FILE,
    PROGRESS_FILE,
    TRAINING_SUFFIX,
    RewardModelProgress,
)
from ludus.trainer.core.output import describe_write_error, partial_path

_CHANGEABLE_FIELDS = ("output", "device", "num_threads")
"""Fields of the configuration that a resumed training may change."""


def check_output(output: Path, *, overwrite: bool) -> None:
    """Check that the output folder is empty, or may be replaced.

    Raises:
        ConfigError: the folder has other contents, or a reward model that must not be replaced.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / METRICS_FILE).is_file():
        raise ConfigError(
            f"output = '{output}' exists and is not the folder of a reward model; choose another "
            "folder"
        )
    if not overwrite:
        raise ConfigError(
            f"output = '{output}' already contains a reward model; replace it with --overwrite, or "
            "choose another folder"
        )


class TrainingFolder:
    """The folder next to the output that exists during training."""

    def __init__(self, path: Path, checkpoint: Path | None) -> None:
        self.path = path
        self._checkpoint = checkpoint

    @classmethod
    @contextmanager
    def open(cls, config: RewardModelConfig, resume: Path | None) -> Iterator[TrainingFolder]:
        """Create or reopen the folder. If training fails without a checkpoint, remove it.

        Args:
            resume: a checkpoint, or a folder that contains one.

        Raises:
            NotFoundError: there is no such checkpoint.
            ConfigError: the folder cannot be written.
        """
        checkpoint = None if resume is None else _find_checkpoint(resume)
        path = training_path(config.output)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if resume is None:
                (path / CHECKPOINT_FILE).unlink(missing_ok=True)
                (path / PROGRESS_FILE).write_text("")
        except OSError as error:
            raise ConfigError(
                f"{describe_write_error(path, error)}; set output to a writable folder"
            ) from error
        try:
            yield cls(path, checkpoint)
        except BaseException:
            if not (path / CHECKPOINT_FILE).exists():
                shutil.rmtree(path, ignore_errors=True)
            raise

    def append_progress(self, progress: RewardModelProgress) -> None:
        """Append a line to progress.jsonl."""
        with (self.path / PROGRESS_FILE).open("a", encoding="utf-8") as file:
            file.write(progress.model_dump_json() + "\n")

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint atomically.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        path = self.path / CHECKPOINT_FILE
        temporary_file = partial_path(path)
        try:
            torch.save(dict(state), temporary_file)
            os.replace(temporary_file, path)
        except (OSError, RuntimeError) as error:
            temporary_file.unlink(missing_ok=True)
            raise CheckpointError(
                f"{describe_write_error(path, error)}; free some space"
            ) from error

    def load_checkpoint(self, config: RewardModelConfig, data: str) -> dict[str, Any] | None:
        """Return the checkpoint to resume from; None for a new training.

        Args:
            data: fingerprint of the comparisons.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            ConfigError: the checkpoint has another configuration or other data.
        """
        if self._checkpoint is None:
            return None
        try:
            state: dict[str, Any] = torch.load(
                self._checkpoint, map_location="cpu", weights_only=True
            )
            old_config = json.loads(state["config"])
        except Exception as error:  # unpickling raises many types of errors
            raise CheckpointError(
                f"checkpoint '{self._checkpoint}' cannot be read: {str(error).splitlines()[0]}; "
                "remove it, and start again"
            ) from error
        new_config = json.loads(config.model_dump_json())
        changes = [
            f"{field} was {old_config.get(field)!r} and is {new_config[field]!r}"
            for field in new_config
            if field not in _CHANGEABLE_FIELDS and old_config.get(field) != new_config[field]
        ]
        if changes:
            raise ConfigError(
                f"a resumed training must keep its configuration, but {'; '.join(changes)}; "
                "restore the old values, or start again without --resume"
            )
        if state["data"] != data:
            raise ConfigError(
                f"data = '{config.data}' has changed since the training started; restore the old "
                "data, or start again without --resume"
            )
        return state

    def remove(self) -> None:
        """Remove the folder at the end of the training."""
        shutil.rmtree(self.path, ignore_errors=True)


def training_path(output: Path) -> Path:
    """Return the path of the training folder for an output folder."""
    return output.with_name(output.name + TRAINING_SUFFIX)


def _find_checkpoint(path: Path) -> Path:
    for file in (path, path / CHECKPOINT_FILE, training_path(path) / CHECKPOINT_FILE):
        if file.is_file():
            return file
    raise NotFoundError(
        f"no checkpoint at '{path}'; give a {CHECKPOINT_FILE}, its folder, or the output of a "
        "training that was stopped"
    )

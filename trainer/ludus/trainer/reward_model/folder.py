"""What the training of a reward model keeps on disk while it goes on, and where it ends up."""

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
from ludus.trainer.core.disk import describe_write_error

OF_NO_ACCOUNT = ("output", "device", "num_threads")
"""What a training may change when it continues."""


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse to write where something else is.

    Raises:
        ConfigError: a reward model is there and must not be replaced, or anything else is.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / METRICS_FILE).is_file():
        raise ConfigError(
            f"output = '{output}' is there already and no reward model's folder; take another one"
        )
    if not overwrite:
        raise ConfigError(
            f"output = '{output}' holds a reward model already; replace it with --overwrite, or "
            "take another folder"
        )


class TrainingFolder:
    """The folder beside the output that is there while training is under way."""

    def __init__(self, path: Path, checkpoint: Path | None) -> None:
        self.path = path
        self._checkpoint = checkpoint

    @classmethod
    @contextmanager
    def opened(cls, config: RewardModelConfig, resume: Path | None) -> Iterator[TrainingFolder]:
        """The folder; `resume` is a checkpoint, or a folder that holds one.

        One that holds no checkpoint when training has failed is removed again.

        Raises:
            NotFoundError: there is no such checkpoint.
            ConfigError: the folder cannot be written.
        """
        checkpoint = None if resume is None else _checkpoint_in(resume)
        path = training_folder(config.output)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if resume is None:
                (path / CHECKPOINT_FILE).unlink(missing_ok=True)
                (path / PROGRESS_FILE).write_text("")
        except OSError as error:
            raise ConfigError(
                f"{describe_write_error(path, error)}; set output to a folder that can be written"
            ) from error
        try:
            yield cls(path, checkpoint)
        except BaseException:
            if not (path / CHECKPOINT_FILE).exists():
                shutil.rmtree(path, ignore_errors=True)
            raise

    def tell(self, progress: RewardModelProgress) -> None:
        """Append a line to progress.jsonl."""
        with (self.path / PROGRESS_FILE).open("a", encoding="utf-8") as file:
            file.write(progress.model_dump_json() + "\n")

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint, whole or not at all.

        Raises:
            CheckpointError: it cannot be written.
        """
        path = self.path / CHECKPOINT_FILE
        aside = path.with_suffix(".partial")
        try:
            torch.save(dict(state), aside)
            os.replace(aside, path)
        except (OSError, RuntimeError) as error:
            aside.unlink(missing_ok=True)
            raise CheckpointError(f"{describe_write_error(path, error)}; make room") from error

    def checkpoint(self, config: RewardModelConfig, data: str) -> dict[str, Any] | None:
        """The checkpoint to continue from; None where training begins.

        Raises:
            CheckpointError: it cannot be read.
            ConfigError: it is of another training, or of other data.
        """
        if self._checkpoint is None:
            return None
        try:
            state: dict[str, Any] = torch.load(
                self._checkpoint, map_location="cpu", weights_only=True
            )
            begun = json.loads(state["config"])
        except Exception as error:  # what unpickles raises classes of its own
            raise CheckpointError(
                f"checkpoint '{self._checkpoint}' cannot be read: {str(error).splitlines()[0]}; "
                "remove it, and begin anew"
            ) from error
        now = json.loads(config.model_dump_json())
        changed = [
            f"{field} was {begun.get(field)!r} and is {now[field]!r}"
            for field in now
            if field not in OF_NO_ACCOUNT and begun.get(field) != now[field]
        ]
        if changed:
            raise ConfigError(
                f"a training that continues stays as it was begun: {'; '.join(changed)}; set it "
                "back, or begin anew, without --resume"
            )
        if state["data"] != data:
            raise ConfigError(
                f"data = '{config.data}' are not those that the training was begun with; bring "
                "those back, or begin anew, without --resume"
            )
        return state

    def discard(self) -> None:
        """Remove the folder: training is over."""
        shutil.rmtree(self.path, ignore_errors=True)


def training_folder(output: Path) -> Path:
    """The folder that is there while a reward model is trained."""
    return output.with_name(output.name + TRAINING_SUFFIX)


def _checkpoint_in(place: Path) -> Path:
    for path in (place, place / CHECKPOINT_FILE, training_folder(place) / CHECKPOINT_FILE):
        if path.is_file():
            return path
    raise NotFoundError(
        f"no checkpoint at '{place}'; expected {CHECKPOINT_FILE}, the folder that holds it, or the "
        "output of a training that was stopped"
    )

"""Checkpoints, which contain everything that a run needs to continue as if it had not stopped.

    checkpoints/step-00000050/
        learner/     weights, optimizer and random state: one part per rank, or agent.pt
        model/       a language model's weights as a Hugging Face folder, for other programs
        state.json   SavedState of the run's kind
        files.json   the size and the checksum of every other file, from its writer

    ranks --write--> step-00000050.partial --driver sees all files--> rename, remove older
    checkpoints except the best

Ranks may write on other nodes. A checkpoint gets its name only when the driver sees all of its
files, and older checkpoints are removed only after that. A checkpoint that was damaged later is
recognized by the sizes and checksums of its files, and skipped. Checksums find damage, not attacks:
a user who can write to the folder can also replace files.json. No file is unpickled freely
(`learner/checkpoint_reader.py`).
"""

from __future__ import annotations

import asyncio
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from ludus.proto.config import AlgorithmConfig
from ludus.proto.errors import CheckpointError, LudusError
from ludus.proto.evaluation_history import EvaluationHistory
from ludus.proto.runs import PolicyResult, Summary
from ludus.trainer.core.checksums import hash_file
from ludus.trainer.core.option_names import name_option
from ludus.trainer.core.output import describe_write_error, rename_folder, warn_user
from ludus.trainer.core.streams import VERSION as STREAMS_VERSION
from ludus.trainer.core.tensor_files import load_plain_values, require_regular_file
from ludus.trainer.core.types import GroupSpec, RolloutGroup, SavedFile
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.mixture import MixtureState
from ludus.trainer.run.entropy_control import EntropyState

_STATE_FILE = "state.json"
_LEARNER_FILE = "agent.pt"
_FILES_FILE = "files.json"
LEARNER_FOLDER, MODEL_FOLDER = "learner", "model"
"""Folders of the learner's state, and of the weights in the Hugging Face format."""
VISIBLE_TIMEOUT_S = 30.0
"""Maximum time for a network file system to show one node's files to another node."""
_POLL_INTERVAL_S = 0.1


class SavedState(BaseModel):
    """The state of a run between two steps, common to all kinds of runs."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)

    step: int = 0
    """Number of training steps done."""
    streams_version: int = Field(default=STREAMS_VERSION, alias="streams")
    """Version of the scheme that derives the run's random streams."""
    start_results: dict[str, PolicyResult] = Field(default={}, alias="start")
    """Results of the policy before training, by environment; empty until they are measured."""
    is_evaluation_due: bool = False
    """True if the run stopped before or during the evaluation after this step."""


StateT = TypeVar("StateT", bound=SavedState)


class RunState(SavedState):
    """The state of a language-model run between two steps.

    `step` is also the version of the weights.
    """

    mixture: MixtureState = Field(default_factory=MixtureState)
    """State from which the next groups are chosen."""
    unfinished_groups: list[GroupSpec] = []
    """Groups that were being played or were about to start; a resumed run plays them again."""
    buffered_groups: list[RolloutGroup] = []
    """Groups that waited for training."""
    counts: dict[str, RolloutCounts] = {}
    """Counts of what was played since the last batch, by environment."""
    entropy: EntropyState | None = None
    """State of the entropy bonus; None before the first step, or without entropy_control."""
    num_zero_variance_groups: int = 0
    """Number of groups of steps without variance, since the last step with variance."""
    games_played: int = 0
    games_trained: int = 0
    episodes_lost: int = 0
    episodes_failed: int = 0
    weight_syncs: int = 0
    canary_failures: int = 0
    canary_max_error: float = 0.0
    environment_restarts: int = 0
    learner_restarts: int = 0
    num_groups_rolled_back: int = 0
    """Groups that were trained on, waiting or being played when a learner died, and were not in
    the checkpoint from which it restarted."""
    max_staleness_seen: int = 0
    reduced_max_tokens: int | None = None
    """Limit of tokens per micro-batch since a learner rank ran out of memory; None if none did."""

    def end_step(self, algorithm: AlgorithmConfig, entropy: float) -> None:
        """Count a trained step of this entropy."""
        self.step += 1
        if algorithm.entropy_control is not None:
            state = self.entropy or EntropyState(coef=algorithm.entropy_coef)
            self.entropy = state.observe(algorithm.entropy_control, entropy)

    def roll_back(self, earlier_state: RunState) -> None:
        """Return to the training state of `earlier_state`.

        Counts of events, such as played episodes and restarts, keep their values.
        """
        self.step = earlier_state.step
        self.entropy = earlier_state.entropy
        self.games_trained = earlier_state.games_trained
        self.unfinished_groups = earlier_state.unfinished_groups
        self.buffered_groups = earlier_state.buffered_groups
        self.num_zero_variance_groups = earlier_state.num_zero_variance_groups

    @property
    def summary_counts(self) -> dict[str, float]:
        """Counts of the whole run, by field of the summary."""
        fields = RunState.model_fields.keys() - SavedState.model_fields.keys()
        counts = self.model_dump(include=fields & Summary.model_fields.keys())
        return counts | {"groups_rolled_back": self.num_groups_rolled_back}

    def clear_groups(self) -> None:
        """Remove the groups and counts that the sampling loop and the buffer now own."""
        self.unfinished_groups, self.buffered_groups, self.counts = [], [], {}


class _FileList(BaseModel):
    """The files of a checkpoint: the content of files.json, which does not list itself."""

    num_bytes: dict[str, NonNegativeInt]
    """Size of each file in bytes, by path in the checkpoint."""
    blake3: dict[str, str] | None = None
    """BLAKE3 hash of each file; None in checkpoints of older versions of Ludus."""

    @classmethod
    def from_saved_files(cls, folder: Path, files: Iterable[SavedFile]) -> _FileList:
        """Build the list of files that were saved in a checkpoint's folder."""
        file_list = cls(num_bytes={}, blake3={})
        for file in files:
            file_list.add(str(file.path.relative_to(folder.absolute())), file)
        return file_list

    def add(self, name: str, file: SavedFile) -> None:
        """Add a file."""
        assert self.blake3 is not None
        self.num_bytes[name], self.blake3[name] = file.num_bytes, file.checksum

    def find_wrong_size(self, checkpoint: Path) -> str | None:
        """Describe the first file that is missing or has another size."""
        for name, num_bytes in self.num_bytes.items():
            if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                return f"'{name}' is not a path in the checkpoint"
            try:
                status = (checkpoint / name).stat()
            except (OSError, ValueError):  # ValueError: the name contains a null character
                return f"{name!r} ({num_bytes} bytes) is missing"
            if not stat.S_ISREG(status.st_mode):
                return f"'{name}' is not a file"
            if status.st_size != num_bytes:
                return f"'{name}' has {status.st_size} bytes instead of {num_bytes}"
        return None

    def find_wrong_content(self, checkpoint: Path) -> str | None:
        """Describe the first file whose content is not the content that was written."""
        if self.blake3 is None:
            return None
        for name in self.num_bytes:
            if hash_file(checkpoint / name) != self.blake3.get(name):
                return f"the content of '{name}' differs from its checksum in '{_FILES_FILE}'"
        return None


class CheckpointFolder:
    """The checkpoints of one run: the latest ones, and the one with the best evaluation."""

    def __init__(self, folder: Path, num_kept: int) -> None:
        self._folder = folder
        self._num_kept = num_kept

    @contextmanager
    def prepare(self, step: int) -> Iterator[Path]:
        """Yield a temporary folder for the checkpoint of `step`; remove it unless committed.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        temporary_folder = self._folder / f"step-{step:08d}.partial"
        try:
            shutil.rmtree(temporary_folder, ignore_errors=True)
            temporary_folder.mkdir(parents=True)
            yield temporary_folder
        except (CheckpointError, OSError) as error:
            # Ray adds the traceback to the message of an error from an actor, but not to its cause.
            cause = getattr(error, "cause", None) or error
            is_described = isinstance(cause, CheckpointError)
            reason = str(cause) if is_described else describe_write_error(temporary_folder, cause)
            raise CheckpointError(f"{reason}; {self._describe_newest()}") from error
        finally:
            shutil.rmtree(temporary_folder, ignore_errors=True)

    async def commit(
        self,
        temporary_folder: Path,
        state: SavedState,
        files: Iterable[SavedFile],
        evaluations: EvaluationHistory | None = None,
    ) -> Path:
        """Wait until all files are visible, then rename the checkpoint's folder; return its path.

        Checkpoints beyond the number to keep are removed, except the best of `evaluations`.
        """
        file_list = _FileList.from_saved_files(temporary_folder, files)
        await asyncio.to_thread(_wait_until_complete, temporary_folder, file_list)
        return self._commit(temporary_folder, state, file_list, evaluations)

    def save(
        self,
        state: SavedState,
        learner_state: Mapping[str, object],
        evaluations: EvaluationHistory | None = None,
    ) -> None:
        """Write the checkpoint of a run that trains in this process.

        Args:
            learner_state: tensors and plain values, for `restore_learner_state`.
            evaluations: results of the evaluations, whose best checkpoint is kept.
        """
        with self.prepare(state.step) as folder:
            path = folder / LEARNER_FOLDER / _LEARNER_FILE
            path.parent.mkdir()
            try:
                torch.save(dict(learner_state), path)
            except RuntimeError as error:  # torch raises it if the disk is full
                raise CheckpointError(describe_write_error(path, error)) from error
            file = SavedFile.from_path(path.absolute())
            file_list = _FileList.from_saved_files(folder, [file])
            self._commit(folder, state, file_list, evaluations)

    def list_newest_first(self) -> list[Path]:
        """Return all checkpoints, including damaged ones."""
        return list_checkpoints(self._folder)[::-1]

    def is_best(self, step: int, evaluations: EvaluationHistory) -> bool:
        """Return whether the policy after `step` is better than those of all checkpoints."""
        if evaluations.find_best([step]) is None:
            return False
        steps = map(parse_checkpoint_step, list_checkpoints(self._folder))
        best_score = evaluations.find_best([*steps, step])
        return best_score is not None and best_score.step == step

    def _commit(
        self,
        temporary_folder: Path,
        state: SavedState,
        file_list: _FileList,
        evaluations: EvaluationHistory | None,
    ) -> Path:
        state_path = temporary_folder / _STATE_FILE
        state_path.write_text(state.model_dump_json(), encoding="utf-8")
        file_list.add(_STATE_FILE, SavedFile.from_path(state_path))
        file_list_json = file_list.model_dump_json(indent=2)
        (temporary_folder / _FILES_FILE).write_text(file_list_json, encoding="utf-8")
        checkpoint = temporary_folder.with_suffix("")
        rename_folder(temporary_folder, checkpoint)
        self._remove_obsolete(checkpoint, evaluations or EvaluationHistory())
        return checkpoint

    def _describe_newest(self) -> str:
        for checkpoint in self.list_newest_first():
            with suppress(CheckpointError):
                _check_sizes(checkpoint)
                return f"the newest complete checkpoint is '{checkpoint}'"
        return "there is no earlier checkpoint"

    def _remove_obsolete(self, newest_checkpoint: Path, evaluations: EvaluationHistory) -> None:
        """Remove older checkpoints except the best, and those of steps before a rollback."""
        checkpoints = list_checkpoints(self._folder)
        end_index = checkpoints.index(newest_checkpoint) + 1
        first_index = max(0, end_index - self._num_kept)
        best_score = evaluations.find_best(map(parse_checkpoint_step, checkpoints[:end_index]))
        for checkpoint in checkpoints[:first_index] + checkpoints[end_index:]:
            if best_score is None or parse_checkpoint_step(checkpoint) != best_score.step:
                shutil.rmtree(checkpoint)


def restore_learner_state(checkpoint: Path, restore: Callable[[dict[str, Any]], object]) -> None:
    """Pass the learner's state that `CheckpointFolder.save` wrote to `restore`.

    Raises:
        CheckpointError: the state cannot be read, or is none of this learner.
    """
    path = checkpoint / LEARNER_FOLDER / _LEARNER_FILE
    try:
        restore(load_plain_values(path))
    except UnpicklingError as error:
        # The message of torch explains how to load such a file without a check.
        unsafe_error = ValueError("it contains an object other than tensors and plain values")
        raise _make_unreadable_error(checkpoint, path.name, unsafe_error) from error
    except LudusError:
        raise
    except KeyError as error:
        missing_error = ValueError(f"it has no value {error}")
        raise _make_unreadable_error(checkpoint, path.name, missing_error) from error
    except Exception as error:  # damaged files raise many types of errors
        raise _make_unreadable_error(checkpoint, path.name, error) from error


def parse_checkpoint_step(checkpoint: Path) -> int:
    """Return the number of training steps before the checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, including damaged ones."""
    paths = folder.glob("step-*")
    return sorted(path for path in paths if path.name.removeprefix("step-").isdecimal())


def find_newest_checkpoint(folder: Path) -> Path:
    """Return the newest complete checkpoint; warn the user of later damaged ones.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    failure = CheckpointError(
        f"there is no checkpoint in '{folder}'; name a run that has one, or train this run first"
    )
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            check_complete(checkpoint)
        except CheckpointError as error:
            warn_user(str(error))
            failure = error
        else:
            return checkpoint
    raise failure


def find_checkpoint(path: Path | None, checkpoints: Path) -> Path:
    """Return the absolute path of a checkpoint; None stands for the latest checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    if path is None:
        return find_newest_checkpoint(checkpoints).absolute()
    named_checkpoint = checkpoints / path
    checkpoint = path if path.exists() or not named_checkpoint.exists() else named_checkpoint
    if checkpoint.is_dir():
        check_complete(checkpoint)
    return checkpoint.absolute()


def check_complete(checkpoint: Path) -> None:
    """Check that all files exist with the content with which they were written.

    Older versions of Ludus recorded no checksums. The user is warned of such a checkpoint, and only
    the sizes of its files are checked.

    Raises:
        CheckpointError: a file is missing or has another content.
    """
    file_list = _check_sizes(checkpoint)
    if file_list.blake3 is None:
        warn_user(
            f"checkpoint '{checkpoint}' was written without checksums, by an older version of "
            "Ludus; only the sizes of its files are checked, and the next checkpoint has checksums"
        )
    try:
        defect = file_list.find_wrong_content(checkpoint)
    except OSError as error:
        defect = f"'{error.filename}': {error.strerror}"
    if defect is not None:
        raise _make_damaged_error(checkpoint, defect)


def _check_sizes(checkpoint: Path) -> _FileList:
    """Return the list of a checkpoint's files; check that all exist and have their sizes."""
    path = checkpoint / _FILES_FILE
    try:
        require_regular_file(path)
        file_list = _FileList.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _make_damaged_error(checkpoint, f"{path.name}: {_get_first_line(error)}") from error
    defect = file_list.find_wrong_size(checkpoint)
    if defect is not None:
        raise _make_damaged_error(checkpoint, defect)
    return file_list


def read_state(checkpoint: Path, state_type: type[StateT]) -> StateT:
    """Return the state of the run at a checkpoint.

    Raises:
        CheckpointError: the state cannot be read.
    """
    path = checkpoint / _STATE_FILE
    if not checkpoint.is_dir():
        examples = ", ".join(map(str, list_checkpoints(checkpoint.parent)))
        raise CheckpointError(
            f"no checkpoint '{checkpoint}'; expected a folder like "
            f"{examples or 'runs/NAME/checkpoints/step-00000100'}"
        )
    try:
        require_regular_file(path)
        return state_type.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _make_unreadable_error(checkpoint, path.name, error) from error


def check_streams(checkpoint: Path, state: SavedState) -> None:
    """Check that the run would continue with the same random numbers."""
    # Checkpoints without a version are older than the first version.
    version = state.streams_version if "streams_version" in state.model_fields_set else 0
    if version != STREAMS_VERSION:
        raise CheckpointError(
            f"checkpoint '{checkpoint}' uses random streams of version {version}, but this Ludus "
            f"uses version {STREAMS_VERSION}; continue with the Ludus that wrote it, or start "
            f"again with {name_option('overwrite')} or under another name (`ludus eval` can still "
            "evaluate its policy)"
        )


def _make_unreadable_error(checkpoint: Path, file_name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint '{checkpoint}' cannot be read: {file_name}: {_get_first_line(error)}; remove "
        "its folder to continue from the previous checkpoint, or start again with "
        f"{name_option('overwrite')}"
    )


def _make_damaged_error(checkpoint: Path, defect: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint '{checkpoint}' cannot be read: {defect}; use an earlier checkpoint "
        f"({name_option('resume')} does so if there is one), or start again with "
        f"{name_option('overwrite')}"
    )


def _get_first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _wait_until_complete(folder: Path, file_list: _FileList) -> None:
    deadline_s = time.monotonic() + VISIBLE_TIMEOUT_S
    while (defect := file_list.find_wrong_size(folder)) is not None:
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"checkpoint '{folder}' is incomplete: {defect}, {VISIBLE_TIMEOUT_S:g} s after "
                "it was written; set output_dir to a folder that all nodes share (earlier "
                "checkpoints are kept)"
            )
        time.sleep(_POLL_INTERVAL_S)

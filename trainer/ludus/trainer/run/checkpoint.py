"""Checkpoints: all it takes to continue as if nothing had happened.

    checkpoints/step-00000050/
        learner/     weights, optimizer, random state, one part per rank
        model/       the weights as a Hugging Face folder, for evaluation and for others
        state.json   RunState
        files.json   the sizes of all the others, as who wrote them saw them

    ranks --write--> step-00000050.partial --the driver sees every file--> renamed, old ones go

Ranks may write on other nodes: a checkpoint gets its name once the driver has seen all of it, and
only then older ones are removed. One that was damaged since is known by its sizes, and passed over.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.proto.config import RunConfig
from ludus.proto.errors import CheckpointError
from ludus.proto.runs import CHECKPOINTS_FOLDER, PolicyResult, Resume
from ludus.trainer.core.disk import describe_write_error
from ludus.trainer.core.streams import VERSION as STREAMS_VERSION
from ludus.trainer.core.types import GroupSpec, RolloutGroup, SavedFile
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.mixture import MixtureState
from ludus.trainer.run.folder import path_of

_STATE_FILE = "state.json"
_FILES_FILE = "files.json"
_APPEARS_TIMEOUT_S = 30.0
"""In which a network file system shows to one node what another has written."""
_PAUSE_S = 0.1


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
    episodes_failed: int = 0
    weight_syncs: int = 0
    canary_failures: int = 0
    canary_max_error: float = 0.0
    environment_restarts: int = 0
    learner_restarts: int = 0
    num_groups_rolled_back: int = 0
    """Groups that were trained on, waited or were played when a learner died, and were not in
    the checkpoint that its successor began with."""
    max_staleness_seen: int = 0
    streams: int = STREAMS_VERSION
    """Of the random numbers that all of it came from."""
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


class FileList(BaseModel):
    """What a checkpoint consists of."""

    num_bytes: Mapping[str, int]
    """Of each file, by its path in the checkpoint."""


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to write the checkpoint of `step` into; one that is not committed is removed.

        Raises:
            CheckpointError: it cannot be written.
        """
        aside = self._folder / f"step-{step:08d}.partial"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            yield aside
        except (CheckpointError, OSError) as error:
            # An error that crossed a Ray actor carries its traceback in the text.
            cause = getattr(error, "cause", None) or error
            is_told = isinstance(cause, CheckpointError)
            told = str(cause) if is_told else describe_write_error(aside, cause)
            raise CheckpointError(f"{told}; {self._what_there_is()}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    async def commit(self, aside: Path, state: BaseModel, files: Iterable[SavedFile]) -> Path:
        """The checkpoint, now whole; the oldest beyond those kept are gone.

        Raises:
            CheckpointError: a file that a rank has written does not reach this process whole.
        """
        sizes = _sizes(aside, files)
        await asyncio.to_thread(_wait_until_whole, aside, sizes)
        return self._commit(aside, state, sizes)

    def commit_own(self, aside: Path, state: BaseModel, files: Iterable[SavedFile]) -> Path:
        """The same, of files that this process has written itself: there is nothing to wait for."""
        return self._commit(aside, state, _sizes(aside, files))

    def _commit(self, aside: Path, state: BaseModel, sizes: dict[str, int]) -> Path:
        (aside / _STATE_FILE).write_text(state.model_dump_json(), encoding="utf-8")
        sizes[_STATE_FILE] = (aside / _STATE_FILE).stat().st_size
        listed = FileList(num_bytes=sizes).model_dump_json(indent=2)
        (aside / _FILES_FILE).write_text(listed, encoding="utf-8")
        target = aside.with_suffix("")
        _replace(aside, target)
        self._remove_others(target)
        return target

    def newest_first(self) -> list[Path]:
        """All checkpoints, whole or not."""
        return list_checkpoints(self._folder)[::-1]

    def _what_there_is(self) -> str:
        for checkpoint in self.newest_first():
            with suppress(CheckpointError):
                check_whole(checkpoint)
                return f"the newest whole one is '{checkpoint}'"
        return "there is none of an earlier step"

    def _remove_others(self, newest: Path) -> None:
        """Remove the oldest, and later ones, which the run has passed over."""
        found = list_checkpoints(self._folder)
        num_before = found.index(newest)
        for old in [*found[: max(0, num_before + 1 - self._keep)], *found[num_before + 1 :]]:
            shutil.rmtree(old)


def learner_folder(checkpoint: Path) -> Path:
    """The learner's part of a checkpoint."""
    return checkpoint / "learner"


def model_folder(checkpoint: Path) -> Path:
    """The checkpoint's weights as a Hugging Face folder."""
    return checkpoint / "model"


def step_of(checkpoint: Path) -> int:
    """The step after which it was written."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; some may have been damaged since."""
    return sorted(path for path in folder.glob("step-*") if path.suffix == "")


def newest_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint; the user is told of later ones that are damaged.

    Raises:
        CheckpointError: there is none.
    """
    failure = CheckpointError(
        f"no checkpoint in '{folder}'; train first, or name one with --checkpoint"
    )
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            check_whole(checkpoint)
        except CheckpointError as error:
            sys.stderr.write(f"warning: {error}\n")
            failure = error
        else:
            return checkpoint
    raise failure


def starting_point(run: RunConfig, resume: Resume) -> Path | None:
    """The checkpoint that the run continues from; None where it begins anew."""
    checkpoints = path_of(run) / CHECKPOINTS_FOLDER
    if resume is Resume.NEVER or (resume is Resume.AUTO and not list_checkpoints(checkpoints)):
        return None
    return newest_checkpoint(checkpoints)


def check_whole(checkpoint: Path) -> None:
    """Check that all files are there, as large as they were written.

    Raises:
        CheckpointError: they are not.
    """
    path = checkpoint / _FILES_FILE
    try:
        listed = FileList.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise _damaged(checkpoint, f"{path.name}: {str(error).splitlines()[0]}") from error
    if (flaw := _flaw(checkpoint, listed.num_bytes)) is not None:
        raise _damaged(checkpoint, flaw)


def read_state(checkpoint: Path) -> RunState:
    """Where the run stood.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = checkpoint / _STATE_FILE
    if not checkpoint.is_dir():
        found = ", ".join(map(str, list_checkpoints(checkpoint.parent)))
        raise CheckpointError(
            f"no checkpoint '{checkpoint}'; expected a folder like "
            f"{found or 'runs/NAME/checkpoints/step-00000100'}"
        )
    try:
        return RunState.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"checkpoint '{checkpoint}' cannot be read: {path.name}: {reason}; remove its folder "
            "to continue from the one before, or start again with --overwrite"
        ) from error


def check_streams(checkpoint: Path, state: RunState) -> None:
    """Refuse to go on where the run would draw other random numbers than it has so far.

    Raises:
        CheckpointError: it was written by a version of Ludus that drew others.
    """
    # Checkpoints that say nothing are older than the number.
    written = state.streams if "streams" in state.model_fields_set else 0
    if written != STREAMS_VERSION:
        raise CheckpointError(
            f"checkpoint '{checkpoint}' was written by a version of Ludus that draws other random "
            f"numbers: expected streams of version {STREAMS_VERSION}, got {written}; continue with "
            "the version that wrote it, or begin again, with --overwrite or under another name "
            "(`ludus eval` judges its policy all the same)"
        )


def _damaged(checkpoint: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint '{checkpoint}' cannot be read: {reason}; the one before is taken where there "
        "is one, otherwise start again with --overwrite"
    )


def _sizes(aside: Path, files: Iterable[SavedFile]) -> dict[str, int]:
    return {str(file.path.relative_to(aside.absolute())): file.num_bytes for file in files}


def _wait_until_whole(aside: Path, sizes: Mapping[str, int]) -> None:
    deadline_s = time.monotonic() + _APPEARS_TIMEOUT_S
    while (flaw := _flaw(aside, sizes)) is not None:
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"checkpoint '{aside}' is not whole: {flaw}, {_APPEARS_TIMEOUT_S:g} s after it was "
                "written; set output_dir to a folder that all nodes share (the checkpoints before "
                "it stay)"
            )
        time.sleep(_PAUSE_S)


def _flaw(checkpoint: Path, sizes: Mapping[str, int]) -> str | None:
    """The first file that is not as it was written, in words."""
    for name, num_bytes in sizes.items():
        try:
            found = (checkpoint / name).stat().st_size
        except OSError:
            return f"'{name}' ({num_bytes} bytes) is not there"
        if found != num_bytes:
            return f"'{name}' has {found} bytes, and {num_bytes} were written"
    return None


def _replace(aside: Path, target: Path) -> None:
    """Give `aside` the name of `target`, which another may have; one of them is always there."""
    old = target.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(aside, target)
    shutil.rmtree(old, ignore_errors=True)

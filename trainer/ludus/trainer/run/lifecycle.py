"""The lifecycle of a run of any kind: opening, resuming and closing its folder.

    find_start --> RunFolder, locked --> trainer.log --> RunStorage: the state, and the checkpoints

For stopping see `core/stopping.py`. The user changes a running run through its control files:

    ludus scale --> control.json in the run's folder -------+--(once a second)-->
    `apply_control_files` in a cluster --> a ConfigMap, mounted as a file --------+    --> resize
    the workers, or stop

A control file states the desired state, not a command. It may be rewritten, and it still applies
when a stopped run resumes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from pydantic import BaseModel, ValidationError

from ludus.env.text.terminal import LogFormatter
from ludus.proto.config import ANY_RUN, AnyRunConfig
from ludus.proto.config.changes import Change, describe_changes, find_changes
from ludus.proto.config.run import RUN_KINDS
from ludus.proto.errors import ConfigError, UserError
from ludus.proto.run_lock import LOCK_FILE, RunLock
from ludus.proto.runs import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    CONTROL_FILE,
    CONTROL_VARIABLE,
    LOG_FILE,
    METRICS_FILE,
    RUN_ID_FILE,
    Resume,
    RunControl,
)
from ludus.trainer.core.option_names import name_option
from ludus.trainer.core.output import choose_temporary_path, warn_user, write_atomically
from ludus.trainer.core.stopping import StopRequest
from ludus.trainer.run.checkpoint import (
    CheckpointFolder,
    StateT,
    check_streams,
    find_newest_checkpoint,
    list_checkpoints,
    read_state,
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunStorage(Generic[StateT]):
    """A run with its locked folder, its checkpoints and its state."""

    folder: RunFolder
    checkpoints: CheckpointFolder
    checkpoint: Path | None
    """Checkpoint that the run resumes from; None for a new run."""
    state: StateT


@contextmanager
def open_run(
    run: AnyRunConfig,
    state_type: type[StateT],
    num_kept: int,
    *,
    resume: Resume,
    overwrite: bool,
) -> Iterator[RunStorage[StateT]]:
    """Open the folder and the log of a run, and close them after the block.

    The run keeps `num_kept` checkpoints. If a UserError ends a new run before its first step, its
    folder is removed.

    Raises:
        UserError: the run cannot start as configured.
    """
    checkpoint, state, changes = find_start(run, resume, state_type)
    if checkpoint is None:
        # resume=auto also replaces a run that stopped before its first checkpoint.
        folder = RunFolder.create(run, overwrite=overwrite or resume is Resume.AUTO)
    else:
        folder = RunFolder.reopen(run)
    try:
        with log_to_folder(folder.path, run.log_level):
            if changes:
                warn_user(
                    f"the run continues with another configuration: {describe_changes(changes)}"
                )
            checkpoints = CheckpointFolder(folder.path / CHECKPOINTS_FOLDER, num_kept)
            yield RunStorage(folder, checkpoints, checkpoint, state)
    except UserError:
        if checkpoint is None and state.step == 0:
            folder.discard()
        raise
    finally:
        folder.close()


def find_start(
    run: AnyRunConfig, resume: Resume, state_type: type[StateT]
) -> tuple[Path | None, StateT, list[Change]]:
    """Return the checkpoint that the run resumes from, its state, and the changes; write nothing.

    A new run has no checkpoint. The changes are the differences from the previous configuration.
    """
    checkpoints = run.folder / CHECKPOINTS_FOLDER
    if resume is Resume.NEVER or (resume is Resume.AUTO and not list_checkpoints(checkpoints)):
        return None, state_type(), []
    checkpoint = find_newest_checkpoint(checkpoints)
    state = read_state(checkpoint, state_type)
    check_streams(checkpoint, state)
    return checkpoint, state, find_config_changes(run.folder, run)


def find_config_changes(path: Path, run: AnyRunConfig) -> list[Change]:
    """Return the changes since the configuration in the run's folder `path`."""
    try:
        previous_run = ANY_RUN.validate_json((path / CONFIG_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"'{path / CONFIG_FILE}' must contain the configuration that the run started with, but "
            f"cannot be read: {error}; restore the file, or start another run"
        ) from None
    return find_changes(previous_run, run)


class RunFolder:
    """The folder of one run, locked so that no other process trains there."""

    def __init__(self, path: Path, lock: RunLock) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, run: AnyRunConfig, *, overwrite: bool) -> RunFolder:
        """Create the folder of a new run and write its configuration."""
        with _lock_folder(run.folder) as lock:
            _prepare_new_folder(run.folder, overwrite=overwrite)
            folder = cls(run.folder, lock)
            folder.write(CONFIG_FILE, run)
            return folder

    @classmethod
    def reopen(cls, run: AnyRunConfig) -> RunFolder:
        """Open the folder of a run that resumes.

        The new configuration is written later, when the start can no longer fail.
        """
        with _lock_folder(run.folder) as lock:
            return cls(run.folder, lock)

    def write(self, name: str, record: BaseModel) -> None:
        """Write a record as a JSON file of the folder."""
        write_atomically(self.path / name, record.model_dump_json(indent=2))

    def discard(self) -> None:
        """Remove the folder and release the lock."""
        _empty_folder(self.path)
        (self.path / RUN_ID_FILE).unlink(missing_ok=True)
        self._lock.release()
        with suppress(OSError):  # another run of this name may have started
            self.path.rmdir()

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()


def ensure_run_id(path: Path) -> str:
    """Return the id of the run in a folder; create the id if there is none.

    The id distinguishes runs of the same name in different folders. It does not change if the run
    is resumed or overwritten, so that the next run can delete this run's data in a shared store.
    """
    id_file = path / RUN_ID_FILE
    if not id_file.exists():
        write_atomically(id_file, make_run_id())
    return id_file.read_text(encoding="utf-8")


def make_run_id() -> str:
    """Return a random run id."""
    return os.urandom(6).hex()


@contextmanager
def log_to_folder(path: Path, level: str) -> Iterator[None]:
    """Log to the run's folder within the block.

    If the program has configured logging, its configuration and log level are kept.
    """
    handler = logging.FileHandler(path / LOG_FILE, encoding="utf-8")
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root_logger = logging.getLogger()
    previous_level = root_logger.level
    if not root_logger.handlers:
        root_logger.setLevel(level.upper())
    root_logger.addHandler(handler)
    try:
        yield
    finally:
        root_logger.removeHandler(handler)
        root_logger.setLevel(previous_level)
        handler.close()


async def apply_control_files(
    run_folder: Path,
    resize: Callable[[int], None],
    stop_request: StopRequest,
    *,
    interval_s: float = 1.0,
) -> None:
    """Apply the control files of a run whenever they change, until cancelled.

    A file that cannot be parsed is logged and changes nothing.
    """
    mounted_path = os.environ.get(CONTROL_VARIABLE)
    paths = [run_folder / CONTROL_FILE, *([Path(mounted_path)] if mounted_path else [])]
    text_by_path: dict[Path, str] = {}
    while True:
        for path in paths:
            text = await asyncio.to_thread(_read_text, path)
            if text is not None and text != text_by_path.get(path):
                text_by_path[path] = text
                _apply_control(text, path, resize, stop_request)
        await asyncio.sleep(interval_s)


@contextmanager
def _lock_folder(path: Path) -> Iterator[RunLock]:
    """Create and lock a folder. If the block fails, release the lock and remove an empty folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = RunLock.take(path)
        try:
            yield lock
        except BaseException:
            lock.release()
            with suppress(OSError):
                path.rmdir()
            raise
    except OSError as error:
        raise ConfigError(
            f"the run's folder '{path}' cannot be written ({error.strerror or error}); set "
            "output_dir (of a reward model: output) to a writable folder"
        ) from error


def _prepare_new_folder(path: Path, *, overwrite: bool) -> None:
    if not _list_entries(path):
        return
    config_path = path / CONFIG_FILE
    has_checkpoints = any(path.glob(f"{CHECKPOINTS_FOLDER}/step-*"))
    is_run = has_checkpoints or (path / METRICS_FILE).is_file() or _is_run_config(config_path)
    if not (is_run or choose_temporary_path(config_path).is_file()):
        raise ConfigError(
            f"'{path}' is not empty and not the folder of a run; use another name or output_dir"
        )
    if has_checkpoints and not overwrite:
        raise ConfigError(
            f"'{path}' already contains a run; continue it with {name_option('resume')}, replace "
            f"it with {name_option('overwrite')}, or use another name"
        )
    _empty_folder(path)


def _is_run_config(path: Path) -> bool:
    """Return whether a config.json is that of a run. Models have a file of this name, too."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("kind") in RUN_KINDS


def _list_entries(path: Path) -> list[Path]:
    """Return the entries of a run's folder except its lock and its id."""
    return [entry for entry in path.iterdir() if entry.name not in (LOCK_FILE, RUN_ID_FILE)]


def _empty_folder(path: Path) -> None:
    """Remove the entries of a run's folder, the configuration last.

    If the removal is interrupted, the configuration still shows that this is the folder of a run.
    """
    for entry in sorted(_list_entries(path), key=lambda entry: entry.name == CONFIG_FILE):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None  # usually there is no such file


def _apply_control(
    text: str, path: Path, resize: Callable[[int], None], stop_request: StopRequest
) -> None:
    try:
        control = RunControl.model_validate_json(text)
    except ValidationError as error:
        _log.warning("'%s' is ignored: %s", path, error)
        return
    if control.num_workers is not None:
        _log.info("the control file requests %d rollout workers", control.num_workers)
        resize(control.num_workers)
    if control.stop:
        _log.info("the control file requests a stop after this step")
        stop_request.set(from_control_file=True)

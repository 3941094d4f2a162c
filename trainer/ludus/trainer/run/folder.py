"""The folder of a run: its path, its lock, and the files in it (`ludus.proto.runs`)."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel

from ludus.proto.config import RunConfig
from ludus.proto.errors import ConfigError
from ludus.proto.run_lock import LOCK_FILE, RunLock
from ludus.proto.runs import CHECKPOINTS_FOLDER, CONFIG_FILE, LOG_FILE, RUN_ID_FILE
from ludus.trainer.core.output import partial_path, write_atomically


def run_path(run: RunConfig) -> Path:
    """Return the run's folder as an absolute path, so that it is the same for every process."""
    return Path(run.output_dir).absolute() / run.name


def ensure_run_id(path: Path) -> str:
    """Return the id of the run in a folder; create the id if there is none.

    The id distinguishes runs of the same name in different folders. It survives a resume and an
    overwrite, so that the next run can remove what this run left in a shared store.
    """
    file = path / RUN_ID_FILE
    if not file.exists():
        write_atomically(file, make_run_id())
    return file.read_text(encoding="utf-8")


def make_run_id() -> str:
    """Return a random run id."""
    return os.urandom(6).hex()


class RunFolder:
    """The folder of one run, locked so that no other process trains there."""

    def __init__(self, path: Path, lock: RunLock) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS_FOLDER
        self._lock = lock

    @classmethod
    def create(cls, run: RunConfig, *, overwrite: bool) -> RunFolder:
        """Create the folder of a new run and write its configuration.

        Raises:
            ConfigError: the folder contains a run and `overwrite` is false, another process trains
                there, or the folder cannot be written.
        """
        path = run_path(run)
        with _naming_unwritable(path), _lock_folder(path) as lock:
            _clear_for_new_run(path, overwrite=overwrite)
            folder = cls(path, lock)
            folder.write_config(run)
            return folder

    @classmethod
    def reopen(cls, run: RunConfig) -> RunFolder:
        """Open the folder of a run that resumes.

        The configuration in it stays unchanged until `write_config`, because the start may fail.

        Raises:
            ConfigError: another process trains there, or the folder cannot be written.
        """
        path = run_path(run)
        with _naming_unwritable(path), _lock_folder(path) as lock:
            return cls(path, lock)

    def write_config(self, run: RunConfig) -> None:
        """Write the configuration that the run uses from now on."""
        self.write(CONFIG_FILE, run)

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


@contextmanager
def log_to_folder(path: Path, level: str) -> Iterator[None]:
    """Log to the run's folder within the block.

    A program that configured logging itself keeps its configuration, including its level.
    """
    handler = logging.FileHandler(path / LOG_FILE, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    previous_level = root.level
    if not root.handlers:
        root.setLevel(level.upper())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(previous_level)
        handler.close()


@contextmanager
def _naming_unwritable(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a ConfigError that names the folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run's folder '{path}' cannot be written ({error.strerror or error}); set "
            "output_dir to a writable folder"
        ) from error


@contextmanager
def _lock_folder(path: Path) -> Iterator[RunLock]:
    """Create and lock a folder. If the block fails, release the lock and remove an empty folder."""
    path.mkdir(parents=True, exist_ok=True)
    lock = RunLock.take(path)
    try:
        yield lock
    except BaseException:
        lock.release()
        with suppress(OSError):
            path.rmdir()
        raise


def _clear_for_new_run(path: Path, *, overwrite: bool) -> None:
    if not _list_entries(path):
        return
    config_path = path / CONFIG_FILE
    if not (config_path.is_file() or partial_path(config_path).is_file()):
        raise ConfigError(
            f"'{path}' is not empty and not the folder of a run; use another name or output_dir"
        )
    if any(path.glob(f"{CHECKPOINTS_FOLDER}/step-*")) and not overwrite:
        raise ConfigError(
            f"'{path}' already contains a run; continue it with --resume, replace it with "
            "--overwrite, or use another name"
        )
    _empty_folder(path)


def _list_entries(path: Path) -> list[Path]:
    """Return the entries of a run's folder except its lock and its id."""
    return [entry for entry in path.iterdir() if entry.name not in (LOCK_FILE, RUN_ID_FILE)]


def _empty_folder(path: Path) -> None:
    """Remove the entries of a run's folder, the configuration last.

    If the removal is interrupted, the configuration still marks the folder as a run's.
    """
    for entry in sorted(_list_entries(path), key=lambda entry: entry.name == CONFIG_FILE):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()

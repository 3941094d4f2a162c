"""Who writes into a run's folder: one process at a time, and nobody else removes it.

The lock is the file system's (flock): it is free again as soon as its holder is dead, however it
died. A file system that has no such locks is one where nobody can be told apart; there the lock
is always free.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ludus.proto.errors import ConfigError

LOCK_FILE = "run.lock"

_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EACCES)


@dataclass(slots=True)
class RunLock:
    """The right to write into a run's folder, held by this process."""

    _path: Path
    _file: IO[str]

    @classmethod
    def take(cls, folder: Path) -> RunLock:
        """The lock of a folder that is there.

        Raises:
            ConfigError: another process has it.
        """
        path = folder / LOCK_FILE
        while True:
            file = path.open("a+", encoding="utf-8")
            if not _try_lock(file, fcntl.LOCK_EX):
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise ConfigError(
                    f"'{folder}' is in use: {holder} trains there; wait for it, or take another "
                    "name"
                )
            if _is_at(path, file):
                break
            file.close()  # its holder has removed it in between
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return cls(path, file)

    def release(self) -> None:
        """Let others have it; without effect once it is released."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def is_in_use(folder: Path) -> bool:
    """Whether a process writes into the run's folder now."""
    try:
        with (folder / LOCK_FILE).open(encoding="utf-8") as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD_BY_ANOTHER
    return True


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False

"""The lock of a run folder: only one process may write to the folder.

The lock is a file lock (flock), so it is released when its process dies. On file systems without
file locks, the lock is always free.
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

_LOCKED_ERRNOS = (errno.EWOULDBLOCK, errno.EACCES)


@dataclass(slots=True)
class RunLock:
    """The lock of a run folder, owned by this process."""

    _path: Path
    _file: IO[str]

    @classmethod
    def take(cls, folder: Path) -> RunLock:
        """Lock an existing folder.

        Raises:
            ConfigError: another process has the lock.
        """
        path = folder / LOCK_FILE
        while True:
            file = path.open("a+", encoding="utf-8")
            if not _try_lock(file, fcntl.LOCK_EX):
                file.seek(0)
                owner = file.read().strip() or "another process"
                file.close()
                raise ConfigError(
                    f"'{folder}' is in use: {owner} is training in it; wait until it exits, or "
                    "give the run another name"
                )
            if _is_file_at(path, file):
                break
            file.close()  # the previous owner removed the file in the meantime
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return cls(path, file)

    def release(self) -> None:
        """Release the lock. A second call has no effect."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def is_in_use(folder: Path) -> bool:
    """Return whether a process writes to the run folder."""
    try:
        with (folder / LOCK_FILE).open(encoding="utf-8") as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _try_lock(file: IO[str], operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _LOCKED_ERRNOS
    return True


def _is_file_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False

"""Reader of a run's JSON-lines files while the trainer writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from pydantic import BaseModel, ValidationError

RecordT = TypeVar("RecordT", bound=BaseModel)


class RecordsFollower(Generic[RecordT]):
    """A file of records that is read as it grows."""

    def __init__(self, path: Path, record: type[RecordT], *, skip_old: bool = False) -> None:
        """Open nothing yet.

        Args:
            skip_old: ignore an existing file until it is replaced or grows.
        """
        self._path = path
        self._record = record
        self._old = _fingerprint(path) if skip_old else None
        self._inode = 0
        self._offset_bytes = 0
        self.num_unreadable = 0
        """Number of complete lines that are not valid records."""

    def read_new(self) -> list[RecordT]:
        """Return the records since the last call, without an incomplete last line."""
        if _fingerprint(self._path) in (None, self._old):
            return []
        self._old = None
        try:
            with self._path.open("rb") as file:
                self._find_start(file)
                lines, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset_bytes += len(lines) + len(newline)
        records = (self._parse(line) for line in lines.split(b"\n") if line)
        return [record for record in records if record is not None]

    def _find_start(self, file: BinaryIO) -> None:
        """Seek to the first unread byte; to the start if the file was replaced."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset_bytes:
            self._inode, self._offset_bytes = status.st_ino, 0
        file.seek(self._offset_bytes)

    def _parse(self, line: bytes) -> RecordT | None:
        try:
            return self._record.model_validate_json(line)
        except ValidationError:
            self.num_unreadable += 1
            return None


def _fingerprint(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes whenever the file is written or replaced; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size

"""A reader of a run's JSON-lines files that works while the trainer writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from pydantic import BaseModel, ValidationError

RecordT = TypeVar("RecordT", bound=BaseModel)


class RecordsFollower(Generic[RecordT]):
    """A file of records that is read as it grows."""

    def __init__(
        self, path: Path, record_type: type[RecordT], *, skips_old_file: bool = False
    ) -> None:
        """Remember the path; each `read_new` opens the file.

        Args:
            skips_old_file: True to ignore an existing file until it is replaced or grows.
        """
        self._path = path
        self._record_type = record_type
        self._old_fingerprint = _compute_fingerprint(path) if skips_old_file else None
        self._inode = 0
        self._offset_bytes = 0
        self.num_unreadable = 0
        """Number of complete lines that are not valid records."""

    def read_new(self) -> list[RecordT]:
        """Return the records since the last call, without an incomplete last line."""
        if _compute_fingerprint(self._path) in (None, self._old_fingerprint):
            return []
        self._old_fingerprint = None
        try:
            with self._path.open("rb") as file:
                self._seek_unread(file)
                lines, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset_bytes += len(lines) + len(newline)
        records = (self._parse(line) for line in lines.split(b"\n") if line)
        return [record for record in records if record is not None]

    def _seek_unread(self, file: BinaryIO) -> None:
        """Seek to the first unread byte, which is the start of a file that was replaced."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset_bytes:
            self._inode, self._offset_bytes = status.st_ino, 0
        file.seek(self._offset_bytes)

    def _parse(self, line: bytes) -> RecordT | None:
        try:
            return self._record_type.model_validate_json(line)
        except ValidationError:
            self.num_unreadable += 1
            return None


def _compute_fingerprint(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes if the file is written or replaced; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size

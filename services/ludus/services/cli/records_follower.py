"""Reading a run's files of records, one a line, while the trainer writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from pydantic import BaseModel, ValidationError

RecordT = TypeVar("RecordT", bound=BaseModel)


class RecordsFollower(Generic[RecordT]):
    """The records of a file as they come."""

    def __init__(self, path: Path, record: type[RecordT], *, skip_old: bool = False) -> None:
        """`skip_old`: a file that is there already is ignored until it is replaced or grows."""
        self._path = path
        self._record = record
        self._old = _fingerprint(path) if skip_old else None
        self._inode = 0
        self._offset_bytes = 0
        self.num_unreadable = 0
        """Whole lines that are no record."""

    def new(self) -> list[RecordT]:
        """The records since the last call; a line that is still being written has to wait."""
        if _fingerprint(self._path) in (None, self._old):
            return []
        self._old = None
        try:
            with self._path.open("rb") as file:
                self._find_start(file)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset_bytes += len(whole) + len(newline)
        return [one for line in whole.split(b"\n") if line and (one := self._parse(line))]

    def _find_start(self, file: BinaryIO) -> None:
        """Move to what is new: to the very start of a file that took the other one's place."""
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
    """Changes whenever the file is written or replaced; None where none can be seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size

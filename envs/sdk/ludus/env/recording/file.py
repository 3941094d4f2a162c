"""The file of a recording: appended lines, and a new file when it is full."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 1024 * 1024
SUFFIX = ".jsonl"


class RecordingFile:
    """Lines appended to `<name>.jsonl`; a full file is renamed to `<name>.0001.jsonl`."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self.num_lost = 0
        """Number of episodes that could not be written."""
        self._max_bytes = max_bytes
        self._file: IO[bytes] | None = None

    def append(self, line: bytes) -> None:
        """Append a line. If the disk refuses, the line is lost and the loss is logged."""
        try:
            if self._file is None:
                self._file = self._open()
            elif self._file.tell() + len(line) > self._max_bytes:
                self._rename_full_file()
                self._file = self._open()
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            self.num_lost += 1
            _log.error("an episode could not be recorded in %s: %s", self.path, error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab+")
        if file.tell():  # a killed process may have left an incomplete line
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file

    def _rename_full_file(self) -> None:
        self.close()
        number = 1
        while (target := self.path.with_suffix(f".{number:04d}{SUFFIX}")).exists():
            number += 1
        self.path.rename(target)

"""Reading metrics.jsonl while the trainer writes it."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ludus.proto.runs import MetricsRow


class MetricsFollower:
    """The rows of a metrics file as they come.

    Args:
        keep_old_rows: False ignores a file that stood there before, until it is replaced.
    """

    def __init__(self, path: Path, *, keep_old_rows: bool) -> None:
        self._path = path
        self._ignored = None if keep_old_rows else _fingerprint(path)
        self._offset_bytes = 0
        self.num_unreadable = 0
        """Whole lines that are no row."""

    def new_rows(self) -> list[MetricsRow]:
        """The rows since the last call; a line that is still being written has to wait."""
        if _fingerprint(self._path) in (None, self._ignored):
            return []
        self._ignored = None
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset_bytes:
                    self._offset_bytes = 0
                file.seek(self._offset_bytes)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset_bytes += len(whole) + len(newline)
        return [row for line in whole.split(b"\n") if line and (row := self._parse(line))]

    def _parse(self, line: bytes) -> MetricsRow | None:
        try:
            return MetricsRow.model_validate_json(line)
        except ValidationError:
            self.num_unreadable += 1
            return None


def _fingerprint(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file is written or replaced; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size

"""Rows of a text file that stay in the file. The index needs 8 bytes of memory per row.

    when opened:   each row is read and checked, and its offset is stored
    when used:     row i is read from its offset

The file stays open, so replacing it has no effect. If it is changed in place, reading a row fails.
"""

from __future__ import annotations

import csv
import io
import os
import weakref
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

from ludus.env.types import JsonObject
from ludus.proto.errors import ExecutionError

from .rows import RowCheck, check_row, make_row_error

csv.field_size_limit(2**31 - 1)


class _IndexedRows(ABC):
    """Rows of a file, indexed by their offsets."""

    def __init__(self, path: Path, check: RowCheck) -> None:
        self._path = path
        self._offsets = array("Q")
        """uint64 [N + 1] offset of each row, and of the end of the last row, in bytes."""
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._descriptor)
        column_names: dict[str, None] = {}
        with path.open("rb") as file:
            for offset, row in self._scan_rows(file):
                check_row(path, len(self._offsets), row, check)
                if row.keys() != column_names.keys():
                    column_names.update(dict.fromkeys(row))
                self._offsets.append(offset)
            self._offsets.append(file.tell())
        self._columns = tuple(column_names)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, in the order of their first appearance."""
        return self._columns

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> JsonObject:
        offset = self._offsets[index]
        row_bytes = os.pread(self._descriptor, self._offsets[index + 1] - offset, offset)
        try:
            row = self._parse_row(row_bytes)
        except ValueError as error:
            raise ExecutionError(
                f"'{self._path}', row {index + 1} has changed since the server started: {error}; "
                "restart the server, and do not change the file while it runs"
            ) from None
        return {name: row.get(name) for name in self._columns}

    @abstractmethod
    def _scan_rows(self, file: BinaryIO) -> Iterator[tuple[int, JsonObject]]:
        """Yield each row and its offset. Read the whole file."""

    @abstractmethod
    def _parse_row(self, row_bytes: bytes) -> JsonObject:
        """Return the row in these bytes of the file.

        Raises:
            ValueError: The bytes are not a row.
        """


class JsonLinesRows(_IndexedRows):
    """Rows of a file with one JSON object per line. Empty lines are skipped."""

    def _scan_rows(self, file: BinaryIO) -> Iterator[tuple[int, JsonObject]]:
        next_offset = index = 0
        for line_number, line in enumerate(file, start=1):
            offset, next_offset = next_offset, next_offset + len(line)
            if not line.strip():
                continue
            try:
                row = self._parse_row(line)
            except ValueError as error:
                raise make_row_error(self._path, index, f"line {line_number}: {error}") from None
            yield offset, row
            index += 1

    def _parse_row(self, row_bytes: bytes) -> JsonObject:
        line = row_bytes.split(b"\n", 1)[0]
        try:
            row = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
        except orjson.JSONDecodeError as error:
            raise ValueError(f"expected a JSON object, {error.msg}: {line[:80]!r}") from None
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, got {type(row).__name__}")
        return row


class CsvRows(_IndexedRows):
    """Rows of a CSV file with a header. All values are text; quoted values may contain newlines."""

    def _scan_rows(self, file: BinaryIO) -> Iterator[tuple[int, JsonObject]]:
        lines = _CountingLines(file)
        records = csv.reader(lines, strict=True)
        index = 0
        try:
            self._header = next(records, [])
            self._check_header()
            offset = lines.num_bytes
            for record in records:
                if record:
                    yield offset, self._make_row(record)
                    index += 1
                offset = lines.num_bytes
        except (csv.Error, ValueError) as error:
            reason = f"line {records.line_num}: {error}"
            raise make_row_error(self._path, index, reason) from None

    def _parse_row(self, row_bytes: bytes) -> JsonObject:
        for record in csv.reader(io.StringIO(row_bytes.decode("utf-8"), newline=""), strict=True):
            if record:
                return self._make_row(record)
        raise ValueError("expected a record, got none")

    def _make_row(self, record: list[str]) -> JsonObject:
        if len(record) != len(self._header):
            raise ValueError(
                f"expected {len(self._header)} values, one per column of the header, got "
                f"{len(record)}"
            )
        return dict(zip(self._header, record, strict=True))

    def _check_header(self) -> None:
        duplicates = sorted({name for name in self._header if self._header.count(name) > 1})
        if duplicates:
            raise ValueError(f"the header must have distinct names, got {duplicates[0]!r} twice")


class _CountingLines:
    """Iterator over the lines of a file that counts their bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._lines = iter(file)
        self.num_bytes = 0

    def __iter__(self) -> _CountingLines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        is_first = self.num_bytes == 0
        self.num_bytes += len(line)
        return line.decode("utf-8-sig" if is_first else "utf-8")

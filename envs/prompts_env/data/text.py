"""Rows in a file of text, read where they lie: 8 bytes of memory per row, however long it is.

    one pass:    each row is read and checked, and where it begins is noted
    afterwards:  row i is read from there

The file stays open, so that a file which is replaced under its name changes nothing. One that is
changed in place is found out where a row can no longer be read.
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

from .rows import RowCheck, check_row, faulty

csv.field_size_limit(2**31 - 1)


class _IndexedRows(ABC):
    """Rows by where they begin in a file."""

    def __init__(self, path: Path, check: RowCheck) -> None:
        self._path = path
        self._starts = array("Q")
        """[N + 1] bytes from the file's beginning; the last one is where the last row ends."""
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        names: dict[str, None] = {}
        with path.open("rb") as file:
            for start, row in self._scan(file):
                check_row(path, len(self._starts), row, check)
                if row.keys() != names.keys():
                    names.update(dict.fromkeys(row))
                self._starts.append(start)
            self._starts.append(file.tell())
        self._columns = tuple(names)

    @property
    def columns(self) -> tuple[str, ...]:
        """In the order in which they first appear."""
        return self._columns

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> JsonObject:
        start = self._starts[index]
        piece = os.pread(self._file, self._starts[index + 1] - start, start)
        try:
            row = self._parse(piece)
        except ValueError as error:
            raise ExecutionError(
                f"'{self._path}', row {index + 1}: expected what was there when the server "
                f"started, got {error}; start it again, and leave the file as it is meanwhile"
            ) from None
        return {name: row.get(name) for name in self._columns}

    @abstractmethod
    def _scan(self, file: BinaryIO) -> Iterator[tuple[int, JsonObject]]:
        """Each row with its first byte; at the end all of the file has been read."""

    @abstractmethod
    def _parse(self, piece: bytes) -> JsonObject:
        """The row that a piece of the file holds.

        Raises:
            ValueError: it holds none.
        """


class JsonLinesRows(_IndexedRows):
    """An object of JSON per line; empty lines are passed over."""

    def _scan(self, file: BinaryIO) -> Iterator[tuple[int, JsonObject]]:
        end = number = 0
        for line_number, line in enumerate(file, start=1):
            start, end = end, end + len(line)
            if not line.strip():
                continue
            try:
                row = self._parse(line)
            except ValueError as error:
                raise faulty(self._path, number, f"line {line_number}: {error}") from None
            yield start, row
            number += 1

    def _parse(self, piece: bytes) -> JsonObject:
        line = piece.split(b"\n", 1)[0]
        try:
            row = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
        except orjson.JSONDecodeError as error:
            raise ValueError(f"expected an object of JSON, {error.msg}: {line[:80]!r}") from None
        if not isinstance(row, dict):
            raise ValueError(f"expected an object of JSON, got {type(row).__name__}")
        return row


class CsvRows(_IndexedRows):
    """A header, then a record per row; quoted values may hold line breaks, all values are text."""

    def _scan(self, file: BinaryIO) -> Iterator[tuple[int, JsonObject]]:
        lines = _CountedLines(file)
        records = csv.reader(lines, strict=True)
        number = 0
        try:
            self._header = next(records, [])
            self._check_header()
            start = lines.num_bytes
            for record in records:
                if record:
                    yield start, self._row(record)
                    number += 1
                start = lines.num_bytes
        except (csv.Error, ValueError) as error:
            reason = f"line {records.line_num}: {error}"
            raise faulty(self._path, number, reason) from None

    def _parse(self, piece: bytes) -> JsonObject:
        for record in csv.reader(io.StringIO(piece.decode("utf-8"), newline=""), strict=True):
            if record:
                return self._row(record)
        raise ValueError("expected a record, got none")

    def _row(self, record: list[str]) -> JsonObject:
        if len(record) != len(self._header):
            raise ValueError(
                f"expected {len(self._header)} values, one for each of the header's, got "
                f"{len(record)}"
            )
        return dict(zip(self._header, record, strict=True))

    def _check_header(self) -> None:
        twice = sorted({name for name in self._header if self._header.count(name) > 1})
        if twice:
            raise ValueError(f"expected different names in the header, got {twice[0]!r} twice")


class _CountedLines:
    """The lines of a file as text, and how many bytes they took."""

    def __init__(self, file: BinaryIO) -> None:
        self._lines = iter(file)
        self.num_bytes = 0

    def __iter__(self) -> _CountedLines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        is_first = self.num_bytes == 0
        self.num_bytes += len(line)
        return line.decode("utf-8-sig" if is_first else "utf-8")

"""Output of workers on the standard error of their server: bounded, cleaned, marked by worker.

    worker --stdout, stderr--> pipe --WorkerOutput--> "worker 4711: line"

A worker runs code that a policy may have written. Its output must not fill the server's log, forge
lines of the log or control a terminal.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ludus.env.text.terminal import clean_for_terminal

WINDOW_S = 10.0
"""Time for which an allowance of output is granted."""
MAX_WORKER_BYTES = 64 * 1024
"""Maximum output of one worker in a window, with the names and escapes that are added."""
MAX_SERVER_BYTES = 256 * 1024
"""Maximum output of all workers of a server in a window, with names and escapes."""
MAX_LINE_BYTES = 4096
"""Maximum length of a line; a longer line is split."""
_PAUSE_S = 0.01
"""Pause before more output is read from a worker that has used its allowance."""


class OutputAllowance:
    """A number of bytes that may be written in each window of time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._window_start_s = time.monotonic()
        self._num_bytes = 0
        """Number of bytes that were taken in the current window."""

    @property
    def num_left(self) -> int:
        """Number of bytes that may still be written in the current window."""
        now_s = time.monotonic()
        if now_s - self._window_start_s >= WINDOW_S:
            self._window_start_s, self._num_bytes = now_s, 0
        return self._max_bytes - self._num_bytes

    def take(self, num_bytes: int) -> None:
        """Count bytes that are written."""
        self._num_bytes += num_bytes


class WorkerOutput(asyncio.Protocol):
    """The output of one process, from its pipe to standard error, line by line.

    Args:
        name: name of the process, with which every line begins.
        server_allowance: allowance of all workers of the server.
    """

    def __init__(self, name: str, server_allowance: OutputAllowance) -> None:
        self.on_close: Callable[[WorkerOutput], None] = lambda _: None
        """Called after the last line."""
        self._name = name
        self._allowances = OutputAllowance(MAX_WORKER_BYTES), server_allowance
        self._incomplete_line = b""
        self._num_dropped_bytes = 0
        self._transport: asyncio.ReadTransport | None = None

    async def read_from(self, descriptor: int) -> None:
        """Read from a pipe until its last writer has closed it; the descriptor is then closed."""
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: self, pipe)

    def close(self) -> None:
        """Stop reading, although a writer may be left."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: Any) -> None:
        """Keep the transport. Data may come before `read_from` returns."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Write the complete lines, and drop the lines that exceed an allowance."""
        num_allowed = min(len(data), max(self._num_left, 0))
        self._num_dropped_bytes += len(data) - num_allowed
        *lines, self._incomplete_line = (self._incomplete_line + data[:num_allowed]).split(b"\n")
        for line in lines:
            self._write_line(line + b"\n")
        while len(self._incomplete_line) > MAX_LINE_BYTES:
            self._write_line(self._incomplete_line[:MAX_LINE_BYTES])
            self._incomplete_line = self._incomplete_line[MAX_LINE_BYTES:]
        if self._num_dropped_bytes:
            self._pause()

    def connection_lost(self, exc: Exception | None) -> None:
        """Write the last line and the number of dropped bytes."""
        if self._incomplete_line:
            self._write_line(self._incomplete_line)
        if self._num_dropped_bytes:
            self._report_dropped_bytes()
        self.on_close(self)

    def _write_line(self, line: bytes) -> None:
        for start in range(0, len(line), MAX_LINE_BYTES):
            self._write_part(line[start : start + MAX_LINE_BYTES])

    def _write_part(self, part: bytes) -> None:
        """Write a part of a line as a line, or drop the part."""
        text = clean_for_terminal(part.removesuffix(b"\n").decode(errors="replace"))
        line = f"{self._name}: {text}\n"
        if self._num_left < len(line.encode()):
            self._num_dropped_bytes += len(part)
            return
        if self._num_dropped_bytes:
            self._report_dropped_bytes()
        self._write(line)

    def _report_dropped_bytes(self) -> None:
        self._write(
            f"{self._name}: {self._num_dropped_bytes} bytes of output were dropped, because"
            f" a worker may print {MAX_WORKER_BYTES} bytes in {WINDOW_S:g} s, and all workers"
            f" together {MAX_SERVER_BYTES}\n"
        )
        self._num_dropped_bytes = 0

    def _write(self, line: str) -> None:
        for allowance in self._allowances:
            allowance.take(len(line.encode()))
        sys.stderr.write(line)

    @property
    def _num_left(self) -> int:
        """Number of bytes that may still be written in the current window; it may be negative."""
        return min(allowance.num_left for allowance in self._allowances)

    def _pause(self) -> None:
        """Read nothing for a moment, so that the output does not occupy the event loop."""
        assert self._transport is not None, "data comes after the connection"
        self._transport.pause_reading()
        asyncio.get_running_loop().call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

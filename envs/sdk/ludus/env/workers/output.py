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

from ludus.env.text.terminal import clean_for_terminal

WINDOW_S = 10.0
"""Time for which an allowance of output is granted."""
MAX_WORKER_BYTES = 64 * 1024
"""Maximum output of one worker in a window."""
MAX_SERVER_BYTES = 256 * 1024
"""Maximum output of all workers of a server in a window."""
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
        read_name: returns the name of the process, with which every line begins.
        server_allowance: allowance of all workers of the server.
    """

    def __init__(self, read_name: Callable[[], str], server_allowance: OutputAllowance) -> None:
        self.on_close: Callable[[WorkerOutput], None] = lambda _: None
        """Called after the last line."""
        self._read_name = read_name
        self._allowances = OutputAllowance(MAX_WORKER_BYTES), server_allowance
        self._incomplete_line = b""
        self._num_dropped_bytes = 0
        self._transport: asyncio.ReadTransport | None = None

    async def read_from(self, descriptor: int) -> None:
        """Read from a pipe until its last writer has closed it; the descriptor is then closed."""
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: self, pipe)

    def close(self) -> None:
        """Stop reading, although a writer may be left."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Write the complete lines, and drop what exceeds an allowance."""
        num_allowed = min(len(data), *(allowance.num_left for allowance in self._allowances))
        for allowance in self._allowances:
            allowance.take(num_allowed)
        if num_allowed and self._num_dropped_bytes:
            self._report_dropped_bytes()
        self._incomplete_line += data[:num_allowed]
        self._write_lines()
        if num_allowed < len(data):
            self._num_dropped_bytes += len(data) - num_allowed
            self._pause()

    def connection_lost(self, exc: Exception | None) -> None:
        """Write the last line and the number of dropped bytes."""
        if self._incomplete_line:
            self._write_line(self._incomplete_line)
        if self._num_dropped_bytes:
            self._report_dropped_bytes()
        self.on_close(self)

    def _write_lines(self) -> None:
        *lines, self._incomplete_line = self._incomplete_line.split(b"\n")
        for line in lines:
            self._write_line(line)
        while len(self._incomplete_line) > MAX_LINE_BYTES:
            self._write_line(self._incomplete_line[:MAX_LINE_BYTES])
            self._incomplete_line = self._incomplete_line[MAX_LINE_BYTES:]

    def _write_line(self, line: bytes) -> None:
        for start in range(0, max(len(line), 1), MAX_LINE_BYTES):
            part = line[start : start + MAX_LINE_BYTES].decode(errors="replace")
            sys.stderr.write(f"{self._read_name()}: {clean_for_terminal(part)}\n")

    def _report_dropped_bytes(self) -> None:
        sys.stderr.write(
            f"{self._read_name()}: {self._num_dropped_bytes} bytes of output were dropped, because"
            f" a worker may print {MAX_WORKER_BYTES} bytes in {WINDOW_S:g} s, and all workers"
            f" together {MAX_SERVER_BYTES}\n"
        )
        self._num_dropped_bytes = 0

    def _pause(self) -> None:
        """Read nothing for a moment, so that the output does not occupy the event loop."""
        assert self._transport is not None, "data comes from the transport"
        self._transport.pause_reading()
        asyncio.get_running_loop().call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

"""Starts programs through the launcher, and reads what they say.

    async with ProgramHost("offered") as host:
        ended = await host.run(["python", "agent.py"], variables=..., folder=..., readable=...)

A call that is cancelled ends its program, with all that the program has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from ludus.env.programs.launcher import SIZE, STATUS
from ludus.env.programs.order import ProgramExit, ProgramOrder
from ludus.env.sandbox.surroundings import filter_variables, make_workers_folder, remove_folder
from ludus.proto.errors import UnavailableError

MAX_OUTPUT_BYTES = 1 << 20
"""Of a program's standard output, its end; what came before is left out."""
MAX_ERROR_BYTES = 16 << 10
"""Of its standard error."""
_CHUNK_BYTES = 1 << 16
_STOP_WITHIN_S = 5.0

Confinement = Literal["offered", "required", "off"]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What a program said, and how it ended."""

    exit: ProgramExit
    output: str
    """The end of its standard output."""
    errors: str
    """The end of its standard error."""


class ProgramHost:
    """A launcher of programs; belongs to one event loop."""

    def __init__(self, confinement: Confinement = "offered") -> None:
        self._confinement = confinement
        self._ids = itertools.count(1)
        self._sending = asyncio.Lock()
        self._launcher: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        """Start the launcher."""
        self._folder = make_workers_folder()
        self._orders, theirs = socket.socketpair()
        command = [sys.executable, "-m", "ludus.env.programs.launcher", str(theirs.fileno())]
        try:
            self._launcher = subprocess.Popen(
                [*command, str(self._folder), self._confinement],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**filter_variables(os.environ, ()), "PYTHONPATH": os.pathsep.join(sys.path)},
                # A terminal's Ctrl-C is for the run, which then ends the programs.
                start_new_session=True,
            )
        finally:
            theirs.close()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """End the launcher and whatever it has started."""
        self._orders.close()
        if self._launcher is not None:
            try:
                await asyncio.to_thread(self._launcher.wait, _STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                await asyncio.to_thread(self._launcher.wait)
        await asyncio.to_thread(remove_folder, self._folder)

    async def run(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str],
        folder: str,
        readable: Iterable[str] = (),
    ) -> ProgramResult:
        """What the program said, once it has ended.

        Args:
            variables: all of its environment.
            folder: in which it begins.
            readable: files and folders beside the system's.

        Raises:
            UnavailableError: the launcher has died.
        """
        order = ProgramOrder(
            next(self._ids), list(command), dict(variables), folder, list(readable)
        )
        line, their_line = socket.socketpair()
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        try:
            await self._send(order.to_json(), [their_line.fileno(), their_out, their_err])
        except BaseException:
            line.close()
            for one in (out, err):
                os.close(one)
            raise
        finally:
            their_line.close()
            for one in (their_out, their_err):
                os.close(one)
        return await _followed(line, out, err)

    async def _send(self, order: bytes, descriptors: list[int]) -> None:
        def send() -> None:
            socket.send_fds(self._orders, [SIZE.pack(len(order))], descriptors)
            self._orders.sendall(order)

        async with self._sending:
            try:
                # It blocks where an order is larger than what a socket holds.
                await asyncio.shield(asyncio.to_thread(send))
            except OSError as error:
                raise UnavailableError(f"the launcher of programs has died: {error}") from error


async def _followed(line: socket.socket, out: int, err: int) -> ProgramResult:
    reader, writer = await asyncio.open_unix_connection(sock=line)
    try:
        output, errors, status = await asyncio.gather(
            _end_of(out, MAX_OUTPUT_BYTES), _end_of(err, MAX_ERROR_BYTES), reader.read()
        )
    finally:
        writer.close()  # whatever still runs ends with its life line
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if len(status) < STATUS.size:
        raise UnavailableError("the process that minds the program has died")
    (ended,) = STATUS.unpack(status[: STATUS.size])
    return ProgramResult(ProgramExit(ended), output, errors)


async def _end_of(descriptor: int, max_bytes: int) -> str:
    """The last bytes of a pipe, as text, once its other end is closed everywhere."""
    reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
    loop = asyncio.get_running_loop()
    pipe = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - the transport closes it
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    kept = bytearray()
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            kept += chunk
            if len(kept) > 2 * max_bytes:
                del kept[:-max_bytes]
    finally:
        transport.close()
    return bytes(kept[-max_bytes:]).decode(errors="replace")

"""Client of the launcher, which starts programs and collects their output.

    async with ProgramHost("offered") as host:
        completed = await host.run(["python", "agent.py"], variables=..., folder=...)

A cancelled call kills its program with all of the program's descendants.
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

import orjson

from ludus.env.programs.launcher import EXIT_STATUS, LENGTH_PREFIX, ProgramOrder
from ludus.env.runtime import make_module_command
from ludus.env.sandbox.worker_resources import filter_variables, make_workers_folder, remove_folder
from ludus.proto.errors import UnavailableError

MAX_OUTPUT_BYTES = 1 << 20
"""Maximum kept size of a program's standard output; earlier output is dropped."""
MAX_ERROR_BYTES = 16 << 10
"""Maximum kept size of a program's standard error."""
_LAUNCHER = "ludus.env.programs.launcher"
_CHUNK_BYTES = 1 << 16
_STOP_TIMEOUT_S = 5.0

Confinement = Literal["offered", "required", "off"]


@dataclass(frozen=True, slots=True)
class CompletedProgram:
    """The output and the exit status of a program."""

    exit_code: int
    """Exit code, or the negative number of the signal that killed the program."""
    output: str
    """The end of standard output."""
    errors: str
    """The end of standard error."""


class ProgramHost:
    """A launcher of programs; belongs to one event loop."""

    def __init__(self, confinement: Confinement = "offered") -> None:
        self._confinement = confinement
        self._ids = itertools.count(1)
        self._send_lock = asyncio.Lock()
        self.launcher: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        self._folder = make_workers_folder()
        self._order_socket, remote_socket = socket.socketpair()
        command = [*make_module_command(_LAUNCHER), str(remote_socket.fileno())]
        try:
            self.launcher = subprocess.Popen(
                [*command, str(self._folder), self._confinement],
                stdin=subprocess.DEVNULL,
                pass_fds=[remote_socket.fileno()],
                env={**filter_variables(os.environ, ()), "PYTHONPATH": os.pathsep.join(sys.path)},
                # Ctrl-C in a terminal is for the run, which then stops the programs.
                start_new_session=True,
            )
        finally:
            remote_socket.close()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._order_socket.close()
        if self.launcher is not None:
            try:
                await asyncio.to_thread(self.launcher.wait, _STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                await asyncio.to_thread(self.launcher.wait)
        await asyncio.to_thread(remove_folder, self._folder)

    async def run(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str],
        folder: str,
        readable_paths: Iterable[str] = (),
    ) -> CompletedProgram:
        """Run a program in a working folder until it exits, and return its result.

        Args:
            variables: all environment variables of the program.
            readable_paths: readable files and folders in addition to the system's.

        Raises:
            UnavailableError: the launcher has died.
        """
        paths = list(readable_paths)
        order = ProgramOrder(next(self._ids), list(command), dict(variables), folder, paths)
        status_socket, remote_status_socket = socket.socketpair()
        (stdout_fd, remote_stdout_fd), (stderr_fd, remote_stderr_fd) = os.pipe(), os.pipe()
        remote_fds = [remote_status_socket.detach(), remote_stdout_fd, remote_stderr_fd]
        try:
            await self._send(orjson.dumps(order), remote_fds)
        except BaseException:
            status_socket.close()
            for descriptor in (stdout_fd, stderr_fd):
                os.close(descriptor)
            raise
        finally:
            for descriptor in remote_fds:
                os.close(descriptor)
        return await _collect_result(status_socket, stdout_fd, stderr_fd)

    async def _send(self, order: bytes, descriptors: list[int]) -> None:
        def send() -> None:
            socket.send_fds(self._order_socket, [LENGTH_PREFIX.pack(len(order))], descriptors)
            self._order_socket.sendall(order)

        async with self._send_lock:
            try:
                # In a thread, because an order larger than the socket's buffer blocks.
                await asyncio.shield(asyncio.to_thread(send))
            except OSError as error:
                raise UnavailableError(f"the launcher of programs has died: {error}") from error


async def _collect_result(
    status_socket: socket.socket, stdout_fd: int, stderr_fd: int
) -> CompletedProgram:
    reader, writer = await asyncio.open_unix_connection(sock=status_socket)
    try:
        output, errors, status_bytes = await asyncio.gather(
            _read_last_bytes(stdout_fd, MAX_OUTPUT_BYTES),
            _read_last_bytes(stderr_fd, MAX_ERROR_BYTES),
            reader.read(),
        )
    finally:
        writer.close()  # the supervisor then kills everything that still runs
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if len(status_bytes) < EXIT_STATUS.size:
        raise UnavailableError("the supervisor of the program has died")
    (wait_status,) = EXIT_STATUS.unpack(status_bytes[: EXIT_STATUS.size])
    return CompletedProgram(os.waitstatus_to_exitcode(wait_status), output, errors)


async def _read_last_bytes(descriptor: int, max_bytes: int) -> str:
    """Read a pipe until all its writers are closed, and return its last bytes as text."""
    reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
    loop = asyncio.get_running_loop()
    pipe = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - the transport closes it
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    tail = bytearray()
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            tail += chunk
            if len(tail) > 2 * max_bytes:
                del tail[:-max_bytes]
    finally:
        transport.close()
    return bytes(tail[-max_bytes:]).decode(errors="replace")

"""One worker as the server sees it: its calls, its sessions, and why it ended.

    session --call--> CallStream --frames--> worker process
    end of the stream, or of the process --> why it ended --> every session it held

A worker that has ended, or that was told to, is never used again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

from ludus.env.grpc.call_stream import CallStream, StreamBrokenError
from ludus.env.limits import MAX_FRAME_BYTES, MAX_WORKER_CALL_BYTES
from ludus.env.sessions.hosts import OnLost
from ludus.env.workers.forkserver_client import EnvWorkerProcess, ForkServerClient, WorkerExit
from ludus.env.workers.protocol import FRAME_HEADER, WorkerLimits, make_frame, parsed
from ludus.proto.env.v1 import env_pb2 as pb

_FOR_EVER_S = 1e8
"""Time limits are the core's; three years are as good as none."""
_EXIT_REPORT_WITHIN_S = 5.0
"""After this a silent worker is taken to live on; on a busy machine the report is late."""
_SOCKET_HELD_S = 0.2
_RETIRE_WITHIN_S = 2.0
_READ_BUFFER_BYTES = 1 << 20
_RETIRED = "its server has no more use for it"


class Worker:
    """A worker process; `start` makes one.

    Args:
        on_end: told once when it can no longer be used.
    """

    def __init__(
        self,
        worker_id: int,
        fork_server: ForkServerClient,
        limits: WorkerLimits,
        on_end: Callable[[Worker], None],
    ) -> None:
        self.process = EnvWorkerProcess(worker_id, self._on_exit)
        self.sessions: dict[str, OnLost] = {}
        """Whom to tell of its end, by session id."""
        self.was_asked = False
        """To build an environment."""
        self.has_opened = False
        """It has built one."""
        self.is_retired = False
        self.exited = asyncio.Event()
        """Set when the process is gone, as far as that can be known."""
        self._fork_server = fork_server
        self._limits = limits
        self._on_end = on_end
        self._duplex: WorkerDuplex | None = None
        self._exit: WorkerExit | None = None
        self._killed_because = ""
        self._has_ended = False

    async def start(self, num_threads: int) -> None:
        """Connect to a new process; calls wait in the socket until it is there."""
        connection = await self._fork_server.start(self.process, num_threads)
        try:
            reader, writer = await asyncio.open_unix_connection(
                sock=connection, limit=_READ_BUFFER_BYTES
            )
        except BaseException:
            connection.close()
            raise
        self._duplex = WorkerDuplex(reader, writer, self._reason_of_end)
        self.stream = CallStream(
            self._duplex,
            "its worker",
            timeout_s=_FOR_EVER_S,
            max_call_bytes=MAX_WORKER_CALL_BYTES,
            on_broken=self._on_broken,
        )

    @property
    def is_usable(self) -> bool:
        """True when calls may be made."""
        return not self._has_ended and not self.is_retired and not self._killed_because

    @property
    def was_never_forked(self) -> bool:
        """True when its fork server died before it carried the order out, or could not."""
        return self.was_refused or (self.process.is_orphan and self.process.pid is None)

    @property
    def was_refused(self) -> bool:
        """True when there was no process to be had."""
        return self._exit is not None and bool(self._exit.refusal)

    @property
    def end_reason(self) -> str:
        """Why it ended."""
        if self._killed_because:
            return f"its worker was killed: {self._killed_because}"
        if self.is_retired:
            return f"its worker was ended: {_RETIRED}"
        if self._exit is None:
            return "its worker ended, and the process that could tell how had ended before"
        return describe_exit(self._exit, self._limits)

    def kill(self, reason: str) -> None:
        """End it at once, in the middle of whatever it does."""
        if self.is_usable:
            self._killed_because = reason
        self._fork_server.kill(self.process)
        self._hang_up()

    def retire(self) -> None:
        """Let it close its environments and go; kill it when it does not."""
        if not self.is_usable:
            return
        self.is_retired = True
        self._hang_up()
        asyncio.get_running_loop().call_later(_RETIRE_WITHIN_S, self._kill_if_alive)

    def _hang_up(self) -> None:
        if self._duplex is not None:
            self._duplex.cancel()

    def _kill_if_alive(self) -> None:
        if not self.exited.is_set():
            self._fork_server.kill(self.process)

    def _on_exit(self, ended: WorkerExit) -> None:
        self._exit = ended
        self.exited.set()
        # Its own children may still hold the socket.
        asyncio.get_running_loop().call_later(_SOCKET_HELD_S, self._hang_up)

    async def _reason_of_end(self, complaint: str) -> str:
        """Why the stream ended; a worker that still lives without its stream is killed."""
        if complaint:
            self.kill(complaint)
        if not self._killed_because and not self.is_retired and not self.process.is_orphan:
            try:
                await asyncio.wait_for(self.exited.wait(), _EXIT_REPORT_WITHIN_S)
            except TimeoutError:
                if not self.process.is_orphan:
                    self.kill("it closed its connection to the server")
        return self.end_reason

    def _on_broken(self, _: str) -> None:
        self._has_ended = True
        if self.process.is_orphan:
            self._fork_server.kill(self.process)
            self.exited.set()
        sessions, self.sessions = self.sessions, {}
        for on_lost in sessions.values():
            on_lost(self.end_reason)
        self._on_end(self)


class WorkerDuplex:
    """Frames over the socket to a worker, for `CallStream`.

    Args:
        reason_of_end: given a complaint about what was read, or nothing, it says why the
            worker ended.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        reason_of_end: Callable[[str], Awaitable[str]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._reason_of_end = reason_of_end

    async def write(self, batch: pb.CallBatch) -> None:
        """Send the batch."""
        self._writer.write(make_frame(batch.SerializeToString()))
        try:
            await self._writer.drain()
        except OSError as error:
            raise StreamBrokenError(str(error)) from None

    async def __aiter__(self) -> AsyncIterator[pb.ReplyBatch]:
        """The batches of replies."""
        while True:
            complaint = ""
            try:
                frame = await receive_frame(self._reader)
                batch = parsed(pb.ReplyBatch, frame)
            except (asyncio.IncompleteReadError, OSError):
                break
            except (StreamBrokenError, ValueError) as error:
                complaint = f"it answered nonsense: {error}"
                break
            yield batch
        raise StreamBrokenError(await self._reason_of_end(complaint))

    def cancel(self) -> None:
        """End the stream."""
        self._writer.transport.abort()


async def receive_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame.

    Raises:
        StreamBrokenError: it claims to be larger than frames may be.
        IncompleteReadError: the stream has ended.
    """
    (size,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
    if size > MAX_FRAME_BYTES:
        raise StreamBrokenError(f"a frame of {size} bytes, and at most {MAX_FRAME_BYTES} may be")
    return await reader.readexactly(size)


def describe_exit(ended: WorkerExit, limits: WorkerLimits) -> str:
    """How a worker ended, as a clause."""
    if ended.refusal:
        return f"no process was to be had for its worker: {ended.refusal}"
    code = os.waitstatus_to_exitcode(ended.status)
    if code >= 0:
        return f"its worker ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    said = f"its worker was killed by {name}"
    if limits.cpu_s and ended.cpu_s >= 0.9 * limits.cpu_s and name in ("SIGXCPU", "SIGKILL"):
        return f"{said}: it used up its {limits.cpu_s:g} s of CPU time (cpu_limit_s)"
    if name == "SIGKILL":
        return f"{said}, by hand or by the kernel when memory ran out"
    return said

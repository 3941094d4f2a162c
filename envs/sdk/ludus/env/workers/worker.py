"""The server's side of a worker: its sessions, their calls, and the reason for its end.

    WorkerSession --call--> CallStream --frames--> worker process
    end of the stream or process --> reason --> every session of the worker

A worker that has ended, or was asked to stop, is never used again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ludus.env.encoding import EncodedResult, EncodedToolResult, ResetArgs
from ludus.env.grpc.call_stream import CallStream, ConnectionLostError, StreamBrokenError
from ludus.env.limits import MAX_FRAME_BYTES, MAX_WORKER_CALL_BYTES
from ludus.env.messages.protobuf import (
    fill_call_tool,
    fill_reset_args,
    fill_step,
    read_encoded_result,
    read_encoded_tool_result,
)
from ludus.env.sessions.hosts import LostCallback
from ludus.env.types import JsonObject
from ludus.env.workers.forkserver_client import EnvWorkerProcess, ForkServerClient, WorkerExit
from ludus.env.workers.protocol import (
    FRAME_HEADER,
    OrderKind,
    WorkerLimits,
    make_frame,
    parse_message,
)
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import SessionLostError

if TYPE_CHECKING:
    from ludus.env.workers.host import WorkerHost

ReplyT = TypeVar("ReplyT")

_NO_TIMEOUT_S = 1e8
"""Three years, in effect no limit, because `SessionCore` enforces time limits."""
_EXIT_REPORT_TIMEOUT_S = 5.0
"""Maximum delay of an exit report, which is late on a busy machine."""
_DISCONNECT_DELAY_S = 0.2
_RETIRE_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 10.0
_CLOCK_TOLERANCE = 0.1
"""Share of a time limit that counts as expired, because timers are not exact."""
_READ_BUFFER_BYTES = 1 << 20
_RETIRE_REASON = "its server no longer needs it"


class Worker:
    """A worker process, started by `start`.

    Args:
        on_end: called once, when the worker can no longer be used.
    """

    def __init__(
        self,
        worker_id: int,
        fork_server: ForkServerClient,
        limits: WorkerLimits,
        on_end: Callable[[Worker], None],
    ) -> None:
        self.process = EnvWorkerProcess(worker_id, self._on_exit)
        self.sessions: dict[str, LostCallback] = {}
        """Callbacks for the worker's end, by session id."""
        self.was_used = False
        """True if the worker was asked to build an environment."""
        self.has_opened = False
        """True if the worker has built an environment."""
        self.is_retired = False
        self.exit_event = asyncio.Event()
        """Set when the process has exited, or when its fork server has died."""
        self._fork_server = fork_server
        self._limits = limits
        self._on_end = on_end
        self._duplex: WorkerDuplex | None = None
        self._worker_exit: WorkerExit | None = None
        self._kill_reason = ""
        self._has_ended = False

    async def start(self, num_threads: int) -> None:
        """Start a process and connect to it. Calls wait in the socket until it is ready."""
        connection = await self._fork_server.start(OrderKind.START, self.process, num_threads)
        try:
            streams = await asyncio.open_unix_connection(sock=connection, limit=_READ_BUFFER_BYTES)
        except BaseException:
            connection.close()
            raise
        self._duplex = WorkerDuplex(*streams, self._find_end_reason)
        self.stream = CallStream(
            self._duplex,
            "its worker",
            timeout_s=_NO_TIMEOUT_S,
            max_call_bytes=MAX_WORKER_CALL_BYTES,
            on_break=self._on_broken,
        )

    @property
    def is_usable(self) -> bool:
        """True if calls can be made."""
        return not self._has_ended and not self.is_retired and not self._kill_reason

    @property
    def was_never_forked(self) -> bool:
        """True if the fork server died before it forked the worker, or could not fork it."""
        return self.was_refused or (self.process.is_orphan and self.process.pid is None)

    @property
    def was_refused(self) -> bool:
        """True if no process could be forked."""
        return self._worker_exit is not None and bool(self._worker_exit.refusal)

    @property
    def end_reason(self) -> str:
        """Reason for the worker's end, as a clause."""
        if self._kill_reason:
            return f"its worker was killed: {self._kill_reason}"
        if self.is_retired:
            return f"its worker was stopped: {_RETIRE_REASON}"
        if self._worker_exit is None:
            return "its worker ended for an unknown reason, because the fork server had died"
        return describe_exit(self._worker_exit, self._limits)

    def kill(self, reason: str) -> None:
        """Kill the worker at once, even during a call."""
        if self.is_usable:
            self._kill_reason = reason
        self._fork_server.kill(self.process)
        self._disconnect()

    def retire(self) -> None:
        """Let the worker close its environments and exit; kill it if it does not."""
        if not self.is_usable:
            return
        self.is_retired = True
        self._disconnect()
        asyncio.get_running_loop().call_later(_RETIRE_TIMEOUT_S, self._kill_if_alive)

    def _disconnect(self) -> None:
        if self._duplex is not None:
            self._duplex.cancel()

    def _kill_if_alive(self) -> None:
        if not self.exit_event.is_set():
            self._fork_server.kill(self.process)

    def _on_exit(self, worker_exit: WorkerExit) -> None:
        self._worker_exit = worker_exit
        self.exit_event.set()
        # The worker's child processes may still keep the socket open.
        asyncio.get_running_loop().call_later(_DISCONNECT_DELAY_S, self._disconnect)

    async def _find_end_reason(self, fault: str) -> str:
        """Return why the stream ended, and kill the worker if it is still alive."""
        if fault:
            self.kill(fault)
        if not self._kill_reason and not self.is_retired and not self.process.is_orphan:
            try:
                await asyncio.wait_for(self.exit_event.wait(), _EXIT_REPORT_TIMEOUT_S)
            except TimeoutError:
                if not self.process.is_orphan:
                    self.kill("it closed its connection to the server")
        return self.end_reason

    def _on_broken(self, _: str) -> None:
        self._has_ended = True
        if self.process.is_orphan:
            self._fork_server.kill(self.process)
            self.exit_event.set()
        sessions, self.sessions = self.sessions, {}
        for on_lost in sessions.values():
            on_lost(self.end_reason)
        self._on_end(self)


class WorkerSession:
    """A session in a worker; implements `HostedSession`, which documents its methods."""

    __slots__ = ("_host", "_pending_call", "_started_s", "id", "last_result", "worker")
    inline_session = None

    def __init__(self, session_id: str, worker: Worker, host: WorkerHost) -> None:
        self.id = session_id
        self.worker = worker
        self.last_result: EncodedResult | None = None
        self._host = host
        self._pending_call: asyncio.Future[pb.Reply] | None = None
        self._started_s = 0.0

    def remaining_s(self, limit_s: float) -> float:
        return 0.0

    async def open(self, with_text: bool) -> None:
        """Build the environment."""

        def fill_call(call: pb.Call) -> None:
            call.open.session_id = self.id
            call.open.without_text = not with_text

        await self._call_worker(fill_call, lambda _: None)

    async def reset(self, args: ResetArgs) -> EncodedResult:
        def fill_call(call: pb.Call) -> None:
            call.reset.session_id = self.id
            fill_reset_args(call.reset.args, args)

        self.last_result = None
        self.last_result = await self._call_worker(
            fill_call, lambda reply: read_encoded_result(reply.result)
        )
        return self.last_result

    async def step(self, action: bytes | str, step_index: int) -> EncodedResult:
        result = await self._call_worker(
            lambda call: fill_step(call.step, self.id, action, step_index),
            lambda reply: read_encoded_result(reply.result),
        )
        if self.last_result is None or result.step_index != self.last_result.step_index:
            self.last_result = result
        return self.last_result

    async def read_state(self) -> bytes:
        def fill_call(call: pb.Call) -> None:
            call.state.session_id = self.id

        return await self._call_worker(fill_call, lambda reply: reply.state.state_json)

    async def call_tool(self, name: str, arguments: JsonObject) -> EncodedToolResult:
        return await self._call_worker(
            lambda call: fill_call_tool(call.call_tool, self.id, name, arguments),
            lambda reply: read_encoded_tool_result(reply.call_tool),
        )

    async def close(self) -> None:
        def fill_call(call: pb.Call) -> None:
            call.close.session_id = self.id

        worker = self.worker
        worker.sessions.pop(self.id, None)
        if not self._host.shares_workers:
            worker.retire()
            await worker.exit_event.wait()
            return
        limit_s = self._host.step_timeout_s or _CLOSE_TIMEOUT_S
        try:
            await asyncio.wait_for(self._call_worker(fill_call, lambda _: None), limit_s)
        except TimeoutError:
            worker.kill(f"an environment took longer than {limit_s:g} s to close")
        except SessionLostError:
            return

    def kill(self, reason: str) -> None:
        """Kill the worker. If sessions share it, wait until the server's own limit has passed.

        A client may request a shorter limit, but must not end other sessions with it.
        """
        limit_s = self._host.step_timeout_s
        if not self._host.shares_workers:
            self.worker.kill(reason)
            return
        if limit_s <= 0:
            return
        loop = asyncio.get_running_loop()
        remaining_s = limit_s - (loop.time() - self._started_s)
        if remaining_s < limit_s * _CLOCK_TOLERANCE:
            self.worker.kill(reason)
        elif self._pending_call is not None:
            loop.call_later(remaining_s, self._kill_if_pending, self._pending_call, reason)

    def _kill_if_pending(self, call: asyncio.Future[pb.Reply], reason: str) -> None:
        if self._pending_call is call:
            self.worker.kill(reason)

    def _clear_call(self, finished_call: asyncio.Future[pb.Reply]) -> None:
        if self._pending_call is finished_call:
            self._pending_call = None

    async def _call_worker(
        self, fill_call: Callable[[pb.Call], None], read_reply: Callable[[pb.Reply], ReplyT]
    ) -> ReplyT:
        if not self.worker.is_usable:
            raise self._make_lost_error()
        self._pending_call = self.worker.stream.start_call(fill_call)
        self._pending_call.add_done_callback(self._clear_call)
        self._started_s = asyncio.get_running_loop().time()
        try:
            reply = await self._pending_call
        except ConnectionLostError:
            raise self._make_lost_error() from None
        try:
            return read_reply(reply)
        except (ValueError, TypeError) as error:  # a worker runs third-party code
            self.worker.kill(f"it sent an invalid reply: {error}")
            raise self._make_lost_error() from None

    def _make_lost_error(self) -> SessionLostError:
        reason = self.worker.end_reason
        return SessionLostError(f"session {self.id!r} is gone: {reason}; open a new one")


@dataclass(eq=False)
class WorkerDuplex:
    """Frames over the socket to a worker, for `CallStream`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    find_end_reason: Callable[[str], Awaitable[str]]
    """Called at the end of the stream with the fault in the last frame, or ""; returns the reason
    for the worker's end."""

    async def write(self, batch: pb.CallBatch) -> None:
        self.writer.write(make_frame(batch.SerializeToString()))
        try:
            await self.writer.drain()
        except OSError as error:
            raise StreamBrokenError(str(error)) from None

    async def __aiter__(self) -> AsyncIterator[pb.ReplyBatch]:
        while True:
            fault = ""
            try:
                batch = parse_message(pb.ReplyBatch, await receive_frame(self.reader))
            except (asyncio.IncompleteReadError, OSError):
                break
            except (StreamBrokenError, ValueError) as error:
                fault = f"it sent an invalid reply: {error}"
                break
            yield batch
        raise StreamBrokenError(await self.find_end_reason(fault))

    def cancel(self) -> None:
        self.writer.transport.abort()


async def receive_frame(reader: asyncio.StreamReader) -> bytes:
    """Read the next frame.

    Raises:
        StreamBrokenError: the frame is too large.
        IncompleteReadError: the stream has ended.
    """
    (size,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
    if size > MAX_FRAME_BYTES:
        raise StreamBrokenError(f"a frame has {size} bytes; the limit is {MAX_FRAME_BYTES} bytes")
    return await reader.readexactly(size)


def describe_exit(worker_exit: WorkerExit, limits: WorkerLimits) -> str:
    """Describe how a worker ended, as a clause."""
    if worker_exit.refusal:
        return f"no process could be started for its worker: {worker_exit.refusal}"
    exit_code = os.waitstatus_to_exitcode(worker_exit.status)
    if exit_code >= 0:
        return f"its worker exited with code {exit_code}"
    try:
        signal_name = signal.Signals(-exit_code).name
    except ValueError:
        signal_name = f"signal {-exit_code}"
    cause = f"its worker was killed by {signal_name}"
    has_used_cpu_time = limits.cpu_s and worker_exit.cpu_s >= 0.9 * limits.cpu_s
    if has_used_cpu_time and signal_name in ("SIGXCPU", "SIGKILL"):
        return f"{cause}: it used up its {limits.cpu_s:g} s of CPU time (cpu_limit_s)"
    if signal_name == "SIGKILL":
        return f"{cause}, by hand or by the kernel when memory ran out"
    return cause

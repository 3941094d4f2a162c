"""The sessions of a worker process, which the server calls over a socket.

    socket --CallBatch--> sessions of this worker --ReplyBatch--> socket

With one session, or environments that promise to return at once, calls run one after another in
the main thread. Otherwise they run in threads, so that a slow environment does not delay other
sessions. The server makes at most one call per session at a time. The worker exits when the server
closes the socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import orjson

from ludus.env.contract.rules import is_deterministic
from ludus.env.limits import MAX_BATCH_BYTES
from ludus.env.messages.protobuf import (
    fill_error,
    fill_result,
    fill_tool_result,
    make_description_message,
    read_action,
    read_json_object,
    read_reset_args,
)
from ludus.env.sessions.hosts import build_session, describe_environment
from ludus.env.sessions.session import EnvironmentSession
from ludus.env.targets.targets import TargetFactory
from ludus.env.workers.protocol import make_frame, read_frame
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import (
    InvalidCallError,
    SessionLostError,
    UserError,
    read_error_message,
    to_env_error,
)

_log = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 5.0
_RESIDENT_COLUMN = 1
DATA_COLUMN = 5
"""Column of /proc/PID/statm with the size of a process's data."""


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """Facts about an environment that a server needs in addition to its description."""

    error: str = ""
    """Reason why the environment cannot be built; "" if it was built."""
    steps_on_event_loop: bool = False
    memory_mb: float = 0.0
    """Memory of a worker with one environment, before the first step."""
    modules: list[str] = field(default_factory=list)
    """Modules that building the environment imported."""


def serve(connection: socket.socket, factory: TargetFactory, num_threads: int) -> None:
    """Serve calls until the server closes the connection, then close every environment."""
    _exit_on_disconnect(connection)
    sessions = WorkerSessions(factory)
    stream: BufferedReader = connection.makefile("rb")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if num_threads:
            _serve_in_threads(stream, connection, sessions, num_threads)
        else:
            _serve_in_main_thread(stream, connection, sessions)
    sessions.close_all()


def send_description(
    connection: socket.socket, factory: TargetFactory, determinism_check_s: float
) -> None:
    """Build an environment, and send its description and facts to the server.

    The description is empty if the environment cannot be built.

    Args:
        determinism_check_s: time limit of the determinism check in seconds; 0 skips the check. The
            result is sent as one more frame.
    """
    description = pb.DescribeResponse()
    modules_before = set(sys.modules)
    try:
        environment = factory()
        description = make_description_message(describe_environment(environment))
        environment.close()
        facts = EnvironmentFacts(
            steps_on_event_loop=environment.steps_on_event_loop,
            memory_mb=measure_memory_mb(os.getpid()),
            modules=sorted(set(sys.modules) - modules_before),
        )
    except UserError as error:
        facts = EnvironmentFacts(str(error))
    except BaseException as error:  # noqa: BLE001 - third-party code may raise anything
        message = f"{type(error).__name__}: {read_error_message(error)}"
        facts = EnvironmentFacts(f"'{factory.target}' failed with {message}")
    for frame in (description.SerializeToString(), orjson.dumps(facts)):
        connection.sendall(make_frame(frame))
    if determinism_check_s > 0 and not facts.error:
        is_verified = is_deterministic(factory, determinism_check_s)
        connection.sendall(make_frame(b"\1" if is_verified else b"\0"))


def measure_memory_mb(pid: int, column: int = _RESIDENT_COLUMN) -> float:
    """Return a process's memory from a column of /proc/PID/statm; 0 if it cannot be read."""
    try:
        num_pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[column])
    except (OSError, IndexError, ValueError):
        return 0.0
    return num_pages * os.sysconf("SC_PAGESIZE") / 2**20


class WorkerSessions:
    """The sessions of this worker by id."""

    def __init__(self, factory: TargetFactory) -> None:
        self._factory = factory
        self._sessions: dict[str, EnvironmentSession] = {}

    def answer(self, call: pb.Call, reply: pb.Reply) -> int:
        """Fill in the reply to a call and return its approximate size; never raises."""
        call_name = call.WhichOneof("call")
        request = getattr(call, call_name) if call_name else None
        session_id = getattr(request, "session_id", "")
        try:
            return self._answer(call_name, session_id, call, reply)
        except Exception as error:  # noqa: BLE001 - one call's failure must not end the worker
            env_error = to_env_error(error)
            fill_error(reply.error, env_error, session_id)
            return len(env_error.message)

    def close_all(self) -> None:
        """Close every environment."""
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _answer(
        self, call_name: str | None, session_id: str, call: pb.Call, reply: pb.Reply
    ) -> int:
        match call_name:
            case "step":
                result = self._find_session(session_id).step(
                    read_action(call.step), call.step.step_index
                )
            case "reset":
                result = self._find_session(session_id).reset(read_reset_args(call.reset.args))
            case "open":
                factory, with_text = self._factory, not call.open.without_text
                self._sessions[session_id] = build_session(
                    factory, factory.target, session_id, with_text
                )
                reply.open.session_id = session_id
                return 0
            case "close":
                if session := self._sessions.pop(session_id, None):
                    session.close()
                reply.close.SetInParent()
                return 0
            case "state":
                reply.state.state_json = self._find_session(session_id).read_state()
                return len(reply.state.state_json)
            case "call_tool":
                tool_result = self._find_session(session_id).call_tool(
                    call.call_tool.name,
                    read_json_object(call.call_tool.arguments_json, "arguments_json"),
                )
                fill_tool_result(reply.call_tool, session_id, tool_result)
                return len(tool_result.content_json)
            case _:
                raise InvalidCallError(f"workers do not support the call {call_name}")
        fill_result(reply.result, session_id, result)
        return result.num_bytes

    def _find_session(self, session_id: str) -> EnvironmentSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionLostError(f"session {session_id!r} is not in this worker")
        return session


def _serve_in_main_thread(
    stream: BufferedReader, connection: socket.socket, sessions: WorkerSessions
) -> None:
    while (frame := read_frame(stream)) is not None:
        batch, num_bytes = pb.ReplyBatch(), 0
        for call in pb.CallBatch.FromString(frame).calls:
            if num_bytes > MAX_BATCH_BYTES:
                connection.sendall(make_frame(batch.SerializeToString()))
                batch, num_bytes = pb.ReplyBatch(), 0
            num_bytes += sessions.answer(call, batch.replies.add(call_id=call.call_id))
        connection.sendall(make_frame(batch.SerializeToString()))


def _serve_in_threads(
    stream: BufferedReader, connection: socket.socket, sessions: WorkerSessions, num_threads: int
) -> None:
    send_lock = threading.Lock()

    def answer(call: pb.Call) -> None:
        batch = pb.ReplyBatch()
        sessions.answer(call, batch.replies.add(call_id=call.call_id))
        frame = make_frame(batch.SerializeToString())
        with send_lock:
            connection.sendall(frame)

    executor = ThreadPoolExecutor(num_threads, "ludus-env-step")
    while (frame := read_frame(stream)) is not None:
        for call in pb.CallBatch.FromString(frame).calls:
            executor.submit(answer, call)
    executor.shutdown(wait=True, cancel_futures=True)


def _exit_on_disconnect(connection: socket.socket) -> None:
    """Kill this process when its server disconnects, even if a step hangs.

    The fork server does the same, but it may die before the server.
    """
    if not hasattr(select, "POLLRDHUP"):
        return
    threading.Thread(
        target=_kill_after_disconnect, args=(connection.fileno(),), daemon=True
    ).start()


def _kill_after_disconnect(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    poller.poll()
    # Give the worker time to close its environments.
    threading.Event().wait(_EXIT_TIMEOUT_S)
    os.killpg(0, signal.SIGKILL)

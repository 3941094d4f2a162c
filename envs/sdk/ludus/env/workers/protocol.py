"""What a server, its fork server and its workers say to each other over their sockets.

    server   --orders (fixed size, with a socket)--> fork server
    server   <--reports (fixed size)---------------- fork server
    server   <--frames: CallBatch | ReplyBatch-----> worker

A frame is a length and a protobuf message. A worker runs foreign code, so nothing that
comes from one is ever unpickled, and its frames are bounded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import orjson
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ludus.env.limits import MAX_REPLY_FIELDS
from ludus.env.messages.wire_format import check_fields
from ludus.env.sandbox.confine import Sandbox
from ludus.env.targets.importable import FactoryName

MessageT = TypeVar("MessageT")

FRAME_HEADER = struct.Struct("<I")
ORDER = struct.Struct("<BIH")
"""Order, worker id (or a length), and the worker's threads or milliseconds to check."""
REPORT = struct.Struct("<BIiid")
"""Report, worker id, process id, wait status (or a text's length), CPU seconds."""


class OrderKind(IntEnum):
    """What a server tells its fork server."""

    START = 1
    """A worker on the socket that comes along."""
    DESCRIBE = 2
    """A worker that describes the environment and ends."""
    KILL = 3
    IMPORT = 4
    """Modules that building an environment loads; so many bytes of JSON follow."""


class ReportKind(IntEnum):
    """What a fork server tells its server."""

    READY = 1
    """The environment's module is imported."""
    FAILED = 2
    """It is not; a text of so many bytes follows."""
    STARTED = 3
    EXITED = 4
    REFUSED = 5
    """There is no process to be had for a worker; a text of so many bytes follows."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one worker may use; 0 sets no limit."""

    memory_mb: int = 0
    cpu_s: float = 0.0
    disk_mb: int = 0
    """Of its own folder."""


@dataclass(frozen=True, slots=True)
class ForkServerSetup:
    """The first frame that a fork server reads."""

    factory: FactoryName
    sys_path: list[str]
    limits: WorkerLimits
    sandbox: Sandbox
    modules: list[str]
    """What to import beside the factory's own module."""

    def to_json(self) -> bytes:
        """What `from_json` reads back."""
        return orjson.dumps(self)

    @classmethod
    def from_json(cls, text: bytes) -> ForkServerSetup:
        """The setup that `to_json` wrote."""
        found = orjson.loads(text)
        found["factory"] = FactoryName(**found["factory"])
        found["limits"] = WorkerLimits(**found["limits"])
        found["sandbox"] = Sandbox(**found["sandbox"])
        return cls(**found)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


def make_frame(message: bytes) -> bytes:
    """The message with its length before it."""
    return FRAME_HEADER.pack(len(message)) + message


def read_frame(stream: _Readable) -> bytes | None:
    """The next message of a blocking stream; None at its end."""
    header = stream.read(FRAME_HEADER.size) or b""
    if len(header) < FRAME_HEADER.size:
        return None
    (size,) = FRAME_HEADER.unpack(header)
    message = stream.read(size) or b""
    return message if len(message) == size else None


def parsed(kind: type[MessageT], frame: bytes) -> MessageT:
    """The frame as a protobuf message of that kind.

    Raises:
        ValueError: it is none, or holds far too much.
    """
    check_fields(kind, frame, MAX_REPLY_FIELDS)
    message_type: Any = kind
    try:
        message: MessageT = message_type.FromString(frame)
    except DecodeError as error:
        raise ValueError(f"expected a {kind.__name__}: {error}") from None
    return message


def kill_group(pid: int) -> None:
    """Kill a worker and what it has started, or the worker alone before it has a group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)

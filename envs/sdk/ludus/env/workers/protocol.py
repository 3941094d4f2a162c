"""Messages between a server, its fork server and its workers, over sockets.

    server   --orders (fixed size, with a socket)--> fork server
    server   <--reports (fixed size)---------------- fork server
    server   <--frames: CallBatch | ReplyBatch-----> worker

A frame is a length and a protobuf message. A worker runs third-party code, so its messages are
never unpickled and the size of its frames is limited.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ludus.env.limits import MAX_REPLY_FIELDS
from ludus.env.messages.wire_format import check_num_fields
from ludus.env.sandbox.confine import Sandbox
from ludus.env.targets.targets import TargetFactory

MessageT = TypeVar("MessageT")

FRAME_HEADER = struct.Struct("<I")
ORDER_STRUCT = struct.Struct("<BIH")
"""Kind; worker id, or length of a text; number of threads, or check time in milliseconds."""
REPORT_STRUCT = struct.Struct("<BIiid")
"""Kind; worker id; process id; wait status, or length of a text; CPU seconds."""


class OrderKind(IntEnum):
    """Kinds of orders from a server to its fork server."""

    START = 1
    """Start a worker that uses the attached socket."""
    DESCRIBE = 2
    """Start a worker that describes the environment and exits."""
    KILL = 3
    IMPORT = 4
    """Import modules that environments load. Their names follow as JSON."""


class ReportKind(IntEnum):
    """Kinds of reports from a fork server to its server."""

    READY = 1
    """The environment's module is imported."""
    FAILED = 2
    """The import failed; the error's text follows."""
    STARTED = 3
    EXITED = 4
    REFUSED = 5
    """No process can be forked for a worker; the error's text follows."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of one worker; 0 sets no limit."""

    memory_mb: int = 0
    cpu_s: float = 0.0
    disk_mb: int = 0
    """Limit of the worker's folder."""


@dataclass(frozen=True, slots=True)
class ForkServerSetup:
    """First frame that a fork server reads, as JSON."""

    factory: TargetFactory
    sys_path: list[str]
    limits: WorkerLimits
    sandbox: Sandbox
    modules: list[str]
    """Modules to import in addition to the factory's module."""


class _BlockingStream(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


def make_frame(message: bytes) -> bytes:
    """Prefix a message with its length."""
    return FRAME_HEADER.pack(len(message)) + message


def read_frame(stream: _BlockingStream) -> bytes | None:
    """Read the next message, or None at the end of the stream."""
    header = stream.read(FRAME_HEADER.size) or b""
    if len(header) < FRAME_HEADER.size:
        return None
    (size,) = FRAME_HEADER.unpack(header)
    message = stream.read(size) or b""
    return message if len(message) == size else None


def parse_message(message_type: type[MessageT], frame: bytes) -> MessageT:
    """Parse a frame as a protobuf message of the given class.

    Raises:
        ValueError: the frame is not such a message, or has too many fields.
    """
    check_num_fields(message_type, frame, MAX_REPLY_FIELDS)
    parser: Any = message_type
    try:
        message: MessageT = parser.FromString(frame)
    except DecodeError as error:
        raise ValueError(f"expected a {message_type.__name__}: {error}") from None
    return message

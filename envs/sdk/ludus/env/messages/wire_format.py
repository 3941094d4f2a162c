"""How many fields a protobuf message holds, counted before it is parsed.

An embedded message of two bytes takes a hundred in memory: sixteen megabytes of them would take
most of a gigabyte, and a second of the event loop, before anybody could refuse them.
"""

from __future__ import annotations

from typing import Any

_MAX_VARINT_BITS = 63
_SMALL_BYTES = 256 * 1024
"""What cannot hold enough to matter."""


def check_fields(kind: Any, data: bytes, limit: int) -> None:
    """Refuse what would take far more memory than it has bytes.

    Args:
        kind: the message's class.
        limit: fields of it and of the messages in it.

    Raises:
        ValueError: there are more, or it is no such message.
    """
    if len(data) <= _SMALL_BYTES:
        return
    num_fields = 0
    waiting = [(0, len(data), kind.DESCRIPTOR)]
    try:
        while waiting:
            at, end, of = waiting.pop()
            fields = of.fields_by_number
            while at < end:
                num_fields += 1
                if num_fields > limit:
                    raise ValueError(f"expected at most {limit} fields in one message, got more")
                at = _skip(data, at, fields, waiting)
    except IndexError:
        raise ValueError(f"expected a {kind.__name__}, got what ends in the middle") from None


def _skip(data: bytes, at: int, fields: Any, waiting: list[tuple[int, int, Any]]) -> int:
    """Where the next field begins; an embedded message is left to be looked at.

    https://protobuf.dev/programming-guides/encoding/#structure
    """
    tag, at = _read_varint(data, at)
    match tag & 7:
        case 2:
            size, at = _read_varint(data, at)
            field = fields.get(tag >> 3)
            if field is not None and field.message_type is not None:
                waiting.append((at, min(at + size, len(data)), field.message_type))
            return at + size
        case 0:
            return _read_varint(data, at)[1]
        case 1:
            return at + 8
        case 5:
            return at + 4
    raise ValueError("expected no groups of fields, got one")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > _MAX_VARINT_BITS:
            raise ValueError("expected a number of at most 64 bits, got a longer one")

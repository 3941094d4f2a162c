"""A limit on the number of fields in a protobuf message, checked before the message is parsed.

An embedded message of two bytes takes a hundred bytes in memory. 16 MB of such messages would take
almost 1 GB, and a second of the event loop, before the server could refuse them.
"""

from __future__ import annotations

from typing import Any

_MAX_VARINT_BITS = 63
_SMALL_BYTES = 256 * 1024
"""Size up to which a message cannot contain enough fields to matter."""


def check_fields(message_type: Any, data: bytes, limit: int) -> None:
    """Check that an encoded message does not need far more memory than its size.

    Args:
        message_type: class of the message.
        limit: maximum number of fields in the message and its embedded messages.

    Raises:
        ValueError: the message has more fields, or is malformed.
    """
    if len(data) <= _SMALL_BYTES:
        return
    num_fields = 0
    pending_messages = [(0, len(data), message_type.DESCRIPTOR)]
    """Offset, end and type of each message that is still to be scanned."""
    try:
        while pending_messages:
            offset, end, descriptor = pending_messages.pop()
            fields = descriptor.fields_by_number
            while offset < end:
                num_fields += 1
                if num_fields > limit:
                    raise ValueError(f"expected at most {limit} fields in one message, got more")
                offset = _skip_field(data, offset, fields, pending_messages)
    except IndexError:
        raise ValueError(f"got an incomplete {message_type.__name__}") from None


def _skip_field(data: bytes, offset: int, fields: Any, pending: list[tuple[int, int, Any]]) -> int:
    """Return the offset of the next field, and add an embedded message to `pending`.

    https://protobuf.dev/programming-guides/encoding/#structure
    """
    tag, offset = _read_varint(data, offset)
    match tag & 7:
        case 2:
            size, offset = _read_varint(data, offset)
            field = fields.get(tag >> 3)
            if field is not None and field.message_type is not None:
                pending.append((offset, min(offset + size, len(data)), field.message_type))
            return offset + size
        case 0:
            return _read_varint(data, offset)[1]
        case 1:
            return offset + 8
        case 5:
            return offset + 4
    raise ValueError("groups of fields are not supported")


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return the number at the offset and the offset after it."""
    byte = data[offset]
    if byte < 0x80:
        return byte, offset + 1
    value, shift = byte & 0x7F, 7
    while True:
        offset += 1
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset + 1
        shift += 7
        if shift > _MAX_VARINT_BITS:
            raise ValueError("a number must have at most 64 bits")

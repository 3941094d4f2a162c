"""A limit on the number of fields in a protobuf message, checked before the message is parsed.

An embedded message of two bytes takes a hundred bytes in memory. Parsing 16 MB of such messages
would take almost 1 GB and block the event loop for a second, before the server could refuse them.
"""

from __future__ import annotations

from typing import Any

from ludus.env.limits import MAX_CALL_FIELDS

_MAX_VARINT_BITS = 63
_MAX_UNCHECKED_BYTES = 2 * MAX_CALL_FIELDS
"""Maximum size of a message that is not checked. Each field takes at least two bytes."""


def check_num_fields(message_type: Any, encoded_message: bytes, max_fields: int) -> None:
    """Check the number of fields in an encoded message, which determines its size in memory.

    Args:
        message_type: class of the message.
        max_fields: maximum number of fields in the message and its embedded messages.

    Raises:
        ValueError: the message has too many fields, or is malformed.
    """
    if len(encoded_message) <= _MAX_UNCHECKED_BYTES:
        return
    num_fields = 0
    pending_messages = [(0, len(encoded_message), message_type.DESCRIPTOR)]
    """Start offset, end offset and descriptor of each message that is still to be scanned."""
    try:
        while pending_messages:
            offset, end_offset, descriptor = pending_messages.pop()
            fields_by_number = descriptor.fields_by_number
            while offset < end_offset:
                num_fields += 1
                if num_fields > max_fields:
                    raise ValueError(
                        f"expected at most {max_fields} fields in one message, got more"
                    )
                offset = _skip_field(encoded_message, offset, fields_by_number, pending_messages)
    except IndexError:
        raise ValueError(f"got an incomplete {message_type.__name__}") from None


def _skip_field(
    encoded_message: bytes,
    offset: int,
    fields_by_number: Any,
    pending_messages: list[tuple[int, int, Any]],
) -> int:
    """Return the offset of the next field, and add an embedded message to `pending_messages`.

    https://protobuf.dev/programming-guides/encoding/#structure
    """
    tag, offset = _read_varint(encoded_message, offset)
    match tag & 7:
        case 2:
            size, offset = _read_varint(encoded_message, offset)
            field = fields_by_number.get(tag >> 3)
            if field is not None and field.message_type is not None:
                end_offset = min(offset + size, len(encoded_message))
                pending_messages.append((offset, end_offset, field.message_type))
            return offset + size
        case 0:
            return _read_varint(encoded_message, offset)[1]
        case 1:
            return offset + 8
        case 5:
            return offset + 4
    raise ValueError("groups of fields are not supported")


def _read_varint(encoded_message: bytes, offset: int) -> tuple[int, int]:
    """Return the number at the offset and the offset after it."""
    byte = encoded_message[offset]
    if byte < 0x80:
        return byte, offset + 1
    number, shift = byte & 0x7F, 7
    while True:
        offset += 1
        byte = encoded_message[offset]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, offset + 1
        shift += 7
        if shift > _MAX_VARINT_BITS:
            raise ValueError("a number must have at most 64 bits")

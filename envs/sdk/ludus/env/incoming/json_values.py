"""A limit on the number of values in JSON from outside, checked before the JSON is parsed.

A value of two bytes takes a hundred bytes in memory. Parsing and validating 11 MB of such values
would block the event loop for seconds, before the server could refuse them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ludus.proto.errors import InvalidCallError

MAX_JSON_VALUES = 65_536
"""Maximum number of values in one JSON text. Keys do not count."""
_MAX_UNCHECKED_BYTES = 2 * MAX_JSON_VALUES
"""Maximum size of a text that is not checked. Each value takes at least two bytes."""
_MAX_QUOTES = 4 * MAX_JSON_VALUES
"""Maximum number of quotes around the values and their keys."""
_CHUNK_BYTES = 64 * 1024


def check_num_values(*json_texts: bytes | str) -> None:
    """Check the number of values in JSON texts, which determines the cost of parsing them.

    Raises:
        InvalidCallError: all texts together have too many values.
    """
    if has_too_many_values(*json_texts):
        raise InvalidCallError(
            f"JSON must have at most {MAX_JSON_VALUES} values, got more; split the call, or send"
            " large data as one string"
        )


def has_too_many_values(*json_texts: bytes | str) -> bool:
    """Return True if JSON texts have more than `MAX_JSON_VALUES` values together.

    Every value is the first value, follows a comma, or is the first value in brackets. Commas and
    brackets in strings do not count. The texts need not be valid JSON.
    """
    if sum(map(len, json_texts)) <= _MAX_UNCHECKED_BYTES:
        return False
    num_values, num_quotes = 0, 0
    for json_text in json_texts:
        encoded_json = json_text if isinstance(json_text, bytes) else json_text.encode()
        num_values += 1
        for num_marks, num_chunk_quotes in _count_marks(encoded_json):
            num_values += num_marks
            num_quotes += num_chunk_quotes
            if num_values > MAX_JSON_VALUES or num_quotes > _MAX_QUOTES:
                return True
    return False


def _count_marks(encoded_json: bytes) -> Iterator[tuple[int, int]]:
    """Yield the numbers of commas and brackets outside strings, and of quotes, of each chunk."""
    is_in_string, carry = False, b""
    for offset in range(0, len(encoded_json), _CHUNK_BYTES):
        chunk, carry = _blank_escapes(carry + encoded_json[offset : offset + _CHUNK_BYTES])
        pieces = chunk.split(b'"')
        outside_strings = b"".join(pieces[int(is_in_string) :: 2])
        is_in_string ^= len(pieces) % 2 == 0
        yield sum(outside_strings.count(mark) for mark in (b",", b"[", b"{")), len(pieces) - 1


def _blank_escapes(chunk: bytes) -> tuple[bytes, bytes]:
    """Return a chunk without escaped quotes, and the incomplete escape at its end, if any."""
    if b"\\" not in chunk:
        return chunk, b""
    carry = b""
    if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:
        chunk, carry = chunk[:-1], b"\\"
    return chunk.replace(rb"\\", b"  ").replace(rb"\"", b"  "), carry

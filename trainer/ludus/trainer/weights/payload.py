"""One version as the bytes that travel: a safetensors file whose metadata says what it is.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets"}, ...}
    data      the parts, one after another

A complete version is a safetensors file like any other. A delta is one, too: each part is the
compressed difference of one tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ludus.proto.errors import WeightSyncError
from ludus.trainer.weights.manifest import from_raw_bytes, raw_bytes

_LENGTH_BYTES = 8
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True, slots=True)
class Payload:
    """A version, whole or as a difference."""

    version: int
    content_hash: str
    """Of the version that it makes."""
    parent_hash: str | None
    """Of the version that it must be applied to; None = it is complete."""
    parts: Mapping[str, torch.Tensor]
    """Tensors of a complete version; compressed differences, uint8 [n], of a delta."""


def to_buffers(payload: Payload) -> list[np.ndarray]:
    """uint8 arrays which, one after another, are the file; the tensors are not copied."""
    # Large elements first: each part then begins at a multiple of its element's size.
    names = sorted(payload.parts, key=lambda name: (-payload.parts[name].itemsize, name))
    metadata = {"version": str(payload.version), "content_hash": payload.content_hash}
    if payload.parent_hash is not None:
        metadata["parent_hash"] = payload.parent_hash
    header: dict[str, Any] = {"__metadata__": metadata}
    data = [raw_bytes(payload.parts[name]) for name in names]
    end = 0
    for name, piece in zip(names, data, strict=True):
        tensor = payload.parts[name]
        start, end = end, end + piece.nbytes
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    first = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return [np.frombuffer(first, dtype=np.uint8), *data]


def from_buffers(buffers: Sequence[np.ndarray]) -> Payload:
    """The payload that `to_buffers` took apart; its tensors are views of the buffers.

    Args:
        buffers: those of `to_buffers`, or a single one that holds all of them.

    Raises:
        WeightSyncError: it is cut off, or no such file.
    """
    try:
        return _parse(buffers)
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise WeightSyncError(
            f"expected a whole safetensors file of {sum(b.nbytes for b in buffers)} bytes, got "
            f"something cut off or altered ({type(error).__name__}: {error}); check the weight "
            "store"
        ) from error


def _parse(buffers: Sequence[np.ndarray]) -> Payload:
    first = buffers[0]
    num_header = int.from_bytes(first[:_LENGTH_BYTES].tobytes(), "little")
    if not 0 < num_header <= min(_MAX_HEADER_BYTES, first.nbytes - _LENGTH_BYTES):
        raise ValueError(f"its header says that it has {num_header} bytes")
    data_start = _LENGTH_BYTES + num_header
    header = json.loads(first[_LENGTH_BYTES:data_start].tobytes())
    metadata = header.pop("__metadata__")
    # One buffer holds all parts; of several, each but the first is a part.
    pieces = dict(zip(header, buffers[1:], strict=True)) if len(buffers) > 1 else {}
    data = first[data_start:]
    parts: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        if len(buffers) == 1 and not 0 <= start <= end <= data.nbytes:
            raise ValueError(f"'{name}' would end at byte {end} of {data.nbytes}")
        parts[name] = _tensor(pieces.get(name, data[start:end]), entry["dtype"], entry["shape"])
    parent_hash = metadata.get("parent_hash")
    return Payload(int(metadata["version"]), metadata["content_hash"], parent_hash, parts)


def _tensor(piece: np.ndarray, code: str, shape: list[int]) -> torch.Tensor:
    dtype = _DTYPES[code]
    if piece.nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{piece.nbytes} bytes are no {code} of shape {shape}")
    return from_raw_bytes(piece, dtype, shape)

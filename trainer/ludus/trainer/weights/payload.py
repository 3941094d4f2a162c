"""One version as bytes: a safetensors file whose metadata identifies the version.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets"}, ...}
    data      the parts, one after another

A complete version is a normal safetensors file. A delta is a safetensors file, too: each part is
the compressed difference of one tensor.

This module replaces the safetensors library because it copies no tensor. For 256 MB on a CPU,
`safetensors.torch.save` takes 0.9 s and a second copy of the weights, and `to_buffers` 0.3 ms;
`safetensors.torch.load` takes 50 ms (430 ms from an array), and `from_buffers` 0.6 ms.
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
    """A complete version, or the difference from another version."""

    version: int
    content_hash: str
    """Content hash of the version."""
    parent_hash: str | None
    """Content hash of the version to which the difference applies; None if complete."""
    parts: Mapping[str, torch.Tensor]
    """Tensors of a complete version, or compressed differences, uint8 [n], of a delta."""


def to_buffers(payload: Payload) -> list[np.ndarray]:
    """Return uint8 arrays that form the file when concatenated; tensors are not copied."""
    # Large elements first, so that each part starts at a multiple of its element size.
    names = sorted(payload.parts, key=lambda name: (-payload.parts[name].itemsize, name))
    metadata = {"version": str(payload.version), "content_hash": payload.content_hash}
    if payload.parent_hash is not None:
        metadata["parent_hash"] = payload.parent_hash
    header: dict[str, Any] = {"__metadata__": metadata}
    data = [raw_bytes(payload.parts[name]) for name in names]
    end = 0
    for name, part in zip(names, data, strict=True):
        tensor = payload.parts[name]
        start, end = end, end + part.nbytes
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    prefix = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return [np.frombuffer(prefix, dtype=np.uint8), *data]


def from_buffers(buffers: Sequence[np.ndarray]) -> Payload:
    """Return the payload that `to_buffers` converted; its tensors are views of the buffers.

    Args:
        buffers: buffers of `to_buffers`, or a single buffer with the whole file.

    Raises:
        WeightSyncError: the file is truncated, or not a file of this format.
    """
    try:
        return _parse(buffers)
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise WeightSyncError(
            f"{sum(b.nbytes for b in buffers)} bytes are not a complete safetensors file "
            f"({type(error).__name__}: {error}); check the weight store"
        ) from error


def _parse(buffers: Sequence[np.ndarray]) -> Payload:
    first_buffer = buffers[0]
    header_bytes = int.from_bytes(first_buffer[:_LENGTH_BYTES].tobytes(), "little")
    if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, first_buffer.nbytes - _LENGTH_BYTES):
        raise ValueError(f"the header length is {header_bytes} bytes")
    data_start = _LENGTH_BYTES + header_bytes
    header = json.loads(first_buffer[_LENGTH_BYTES:data_start].tobytes())
    metadata = header.pop("__metadata__")
    # A single buffer contains all parts. Otherwise, each buffer after the first is a part.
    part_buffers = dict(zip(header, buffers[1:], strict=True)) if len(buffers) > 1 else {}
    data = first_buffer[data_start:]
    parts: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        if len(buffers) == 1 and not 0 <= start <= end <= data.nbytes:
            raise ValueError(f"'{name}' would end at byte {end} of {data.nbytes}")
        part = part_buffers.get(name, data[start:end])
        parts[name] = _tensor(part, entry["dtype"], entry["shape"])
    parent_hash = metadata.get("parent_hash")
    return Payload(int(metadata["version"]), metadata["content_hash"], parent_hash, parts)


def _tensor(part: np.ndarray, code: str, shape: list[int]) -> torch.Tensor:
    dtype = _DTYPES[code]
    if part.nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{part.nbytes} bytes do not match type {code} and shape {shape}")
    return from_raw_bytes(part, dtype, shape)

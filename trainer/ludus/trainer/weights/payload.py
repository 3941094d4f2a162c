"""One version of the weights: its manifest with checksums, and its bytes as a safetensors file.

The manifest is sent through Ray, separately from the tensors. Its checksums are BLAKE3, so a
program with write access to the folder or bucket still cannot give other weights to the workers.
A checksum costs about as much as a copy of the tensor.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets"}, ...}
    data      the parts, one after another

A complete version is a normal safetensors file. This module replaces the safetensors library
because it copies no tensor. For 256 MB on a CPU, `safetensors.torch.save` takes 0.9 s and a second
copy of the weights, and `encode_payload` 0.3 ms; `safetensors.torch.load` takes 50 ms (430 ms from
an array), and `decode_payload` 0.6 ms.

A delta is a safetensors file, too: each part is the compressed difference of one tensor.

    old bits ^ new bits  ->  bytes grouped by significance  ->  zstd level 1

A small step leaves most bfloat16 weights unchanged, bit for bit, and in the others it leaves sign
and exponent unchanged, so their difference is zero there. Grouping the bytes by significance puts
these zeros next to each other. A list of changed elements with their new values was measured to be
larger (see `bench/weights.py`), and needs a second format.

A bitwise difference reverts itself when it is applied twice, so it must be applied to the right
version: `apply_delta` refuses any other.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zstandard
from blake3 import blake3

from ludus.proto.errors import WeightSyncError
from ludus.trainer.core.interfaces import StateDict
from ludus.trainer.core.types import ScoringRequest, TensorEntry, WeightManifest

_DIGEST_BYTES = 16
_COMPRESSION_LEVEL = 1
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


def cast_floats(state: StateDict, dtype: str) -> dict[str, torch.Tensor]:
    """Return the tensors to publish: floating-point ones in `dtype`, contiguous, on the CPU."""
    target = getattr(torch, dtype)
    return {
        name: (tensor.to(target) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in state.items()
    }


def make_manifest(
    version: int,
    state: StateDict,
    canary: Sequence[ScoringRequest],
    canary_logprobs: Sequence[Sequence[float]],
) -> WeightManifest:
    """Return the manifest of `state` as version `version`."""
    entries = tuple(_entry(name, tensor) for name, tensor in sorted(state.items()))
    logprobs = tuple(map(tuple, canary_logprobs))
    return WeightManifest(version, entries, _content_hash(entries), tuple(canary), logprobs)


def verify(
    manifest: WeightManifest,
    state: StateDict,
    verified: Mapping[str, TensorEntry] | None = None,
    changed: Collection[str] = (),
) -> None:
    """Check that the tensors are those that were published.

    `verified` has the entries of tensors that were already verified, and not written to since; only
    those in `changed` are checked again. By default all tensors are checked.

    Raises:
        WeightSyncError: a tensor is missing, unknown, of another shape, or changed.
    """
    published_entries = {entry.name: entry for entry in manifest.tensors}
    if published_entries.keys() != state.keys():
        raise WeightSyncError(
            f"weights version {manifest.version} has {len(published_entries)} tensors, but "
            f"{len(state)} "
            f"arrived; they differ in {sorted(published_entries.keys() ^ state.keys())[:5]}"
        )
    for name, tensor in state.items():
        entry = None if verified is None or name in changed else verified.get(name)
        if (entry or _entry(name, tensor)) != published_entries[name]:
            raise WeightSyncError(
                f"weights version {manifest.version}: tensor '{name}' arrived altered (checksum "
                f"or shape {tuple(tensor.shape)} differs); check the weight store"
            )


def encode_payload(payload: Payload) -> list[np.ndarray]:
    """Return uint8 arrays that form the file when concatenated; tensors are not copied."""
    # Large elements first, so that each part starts at a multiple of its element size.
    names = sorted(payload.parts, key=lambda name: (-payload.parts[name].itemsize, name))
    metadata = {"version": str(payload.version), "content_hash": payload.content_hash}
    if payload.parent_hash is not None:
        metadata["parent_hash"] = payload.parent_hash
    header: dict[str, Any] = {"__metadata__": metadata}
    data = [view_bytes(payload.parts[name]) for name in names]
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


def decode_payload(buffers: Sequence[np.ndarray]) -> Payload:
    """Return the payload that `encode_payload` converted; its tensors are views of the buffers.

    The buffers are those of `encode_payload`, or a single buffer with the whole file.

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


def encode_delta(old: StateDict, new: StateDict, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the compressed differences of the named tensors, which both versions have."""

    def encode(name: str) -> torch.Tensor:
        return encode_difference(old[name], new[name])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return dict(zip(names, pool.map(encode, names), strict=True))


def encode_difference(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return uint8 [n] the compressed difference of tensors of the same type and shape."""
    difference = view_bytes(old) ^ view_bytes(new)
    grouped = np.ascontiguousarray(difference.reshape(-1, new.itemsize).T)
    frame = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(grouped.data)
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def decode_difference(old: torch.Tensor, frame: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `encode_difference` got as `new`.

    Raises:
        ValueError: the difference is of a tensor of another size, or damaged.
    """
    num_bytes = old.numel() * old.itemsize
    compressed = view_bytes(frame).data
    # The frame states its size, which decides how much memory is allocated, so check it first.
    frame_bytes = zstandard.frame_content_size(compressed)
    if frame_bytes != num_bytes:
        raise ValueError(f"the difference has {frame_bytes} bytes, the tensor has {num_bytes}")
    grouped = np.frombuffer(zstandard.ZstdDecompressor().decompress(compressed), dtype=np.uint8)
    difference = np.ascontiguousarray(grouped.reshape(old.itemsize, -1).T).reshape(-1)
    return restore_tensor(difference ^ view_bytes(old), old.dtype, old.shape)


def apply_delta(state: StateDict, state_hash: str, delta: Payload) -> dict[str, torch.Tensor]:
    """Return the tensors of the delta's version; unchanged tensors are the same objects.

    Raises:
        WeightSyncError: `state` is not the version that the delta builds on, or it is damaged.
    """
    if delta.parent_hash != state_hash:
        raise WeightSyncError(
            f"weights version {delta.version} is a difference from {delta.parent_hash} and cannot "
            f"be applied to {state_hash}; apply it to its parent, once, or fetch the "
            "newest complete version"
        )

    def decode(name: str) -> torch.Tensor:
        try:
            return decode_difference(state[name], delta.parts[name])
        except (KeyError, ValueError, zstandard.ZstdError) as error:
            raise WeightSyncError(
                f"weights version {delta.version}: the difference of tensor '{name}' cannot be "
                f"applied ({type(error).__name__}: {error}); check the weight store"
            ) from error

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return {**state, **dict(zip(delta.parts, pool.map(decode, delta.parts), strict=True))}


def view_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return uint8 [bytes] the elements in row-major order; a view if the tensor is contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy()


def restore_tensor(
    raw: np.ndarray, dtype: torch.dtype, shape: Sequence[int] | torch.Size
) -> torch.Tensor:
    """Return the tensor from which `view_bytes` made these bytes; a view of them."""
    if raw.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # Ray's shared memory is read-only, and fetched weights are never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(raw).view(dtype).reshape(shape)


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
    return restore_tensor(part, dtype, shape)


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    data = view_bytes(tensor)
    digest = blake3(data.data, max_threads=torch.get_num_threads())
    checksum = digest.hexdigest(length=_DIGEST_BYTES)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, dtype, tuple(tensor.shape), data.nbytes, checksum)


def _content_hash(entries: tuple[TensorEntry, ...]) -> str:
    digest = blake3()
    for entry in entries:
        digest.update(f"{entry.name} {entry.dtype} {entry.shape} {entry.checksum}\n".encode())
    return digest.hexdigest(length=_DIGEST_BYTES)

"""One version of the weights: its manifest with checksums, and its bytes as a safetensors file.

The manifest is sent through Ray, separately from the tensors. Its checksums are BLAKE3 hashes. So
even a program with write access to the folder or bucket cannot make workers accept other weights.
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

A bitwise difference reverts itself when it is applied twice. So `apply_delta` refuses any version
but the one that the difference was computed from.
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
_TYPE_CODES = {
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
_DTYPE_BY_CODE = {code: dtype for dtype, code in _TYPE_CODES.items()}


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
    """Return contiguous tensors on the CPU, with floating-point tensors converted to `dtype`."""
    target_dtype = getattr(torch, dtype)
    return {
        name: (tensor.to(target_dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in state.items()
    }


def make_manifest(
    version: int,
    state: StateDict,
    canary: Sequence[ScoringRequest],
    canary_logprobs: Sequence[Sequence[float]],
    rounding_error: float = 0.0,
) -> WeightManifest:
    """Return the manifest of `state` as version `version`."""
    entries = tuple(_make_entry(name, tensor) for name, tensor in sorted(state.items()))
    logprobs = tuple(map(tuple, canary_logprobs))
    content_hash = _hash_content(entries)
    return WeightManifest(version, entries, content_hash, tuple(canary), logprobs, rounding_error)


def verify_tensors(
    manifest: WeightManifest,
    state: StateDict,
    verified_entries: Mapping[str, TensorEntry] | None = None,
    changed_names: Collection[str] = (),
) -> None:
    """Check that the tensors are those that were published.

    `verified_entries` has the entries of tensors that were already verified and not changed since.
    Only the tensors in `changed_names` are checked again. By default, all tensors are checked.

    Raises:
        WeightSyncError: a tensor is missing, unknown, of another shape, or changed.
    """
    published_entries = {entry.name: entry for entry in manifest.tensors}
    if published_entries.keys() != state.keys():
        raise WeightSyncError(
            f"weights version {manifest.version} has {len(published_entries)} tensors, but "
            f"{len(state)} arrived; they differ in "
            f"{sorted(published_entries.keys() ^ state.keys())[:5]}"
        )
    for name, tensor in state.items():
        entry = None if name in changed_names else (verified_entries or {}).get(name)
        if (entry or _make_entry(name, tensor)) != published_entries[name]:
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
    parts = {name: payload.parts[name] for name in names}
    file_start = np.frombuffer(encode_file_start(parts, metadata), dtype=np.uint8)
    return [file_start, *map(view_bytes, parts.values())]


def encode_file_start(tensors: StateDict, metadata: Mapping[str, str]) -> bytes:
    """Return a file's bytes before its tensors: length and header. The tensors need no data."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        type_code, shape = _TYPE_CODES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": type_code, "shape": shape, "data_offsets": [start, end]}
    header_json = json.dumps(header, separators=(",", ":")).encode()
    header_json += b" " * (-len(header_json) % _ALIGNMENT)
    return len(header_json).to_bytes(_LENGTH_BYTES, "little") + header_json


def decode_payload(buffers: Sequence[np.ndarray]) -> Payload:
    """Return the payload that was encoded; its tensors are views of the buffers.

    The buffers are the result of `encode_payload`, or a single buffer with the whole file.

    Raises:
        WeightSyncError: the file is truncated, or not a file of this format.
    """
    try:
        return _parse_buffers(buffers)
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise WeightSyncError(
            f"{sum(buffer.nbytes for buffer in buffers)} bytes are not a complete safetensors file "
            f"({type(error).__name__}: {error}); check the weight store"
        ) from error


def encode_delta(old_state: StateDict, new_state: StateDict, names: Sequence[str]) -> StateDict:
    """Return the compressed differences of the named tensors, which both versions have."""

    def encode(name: str) -> torch.Tensor:
        return encode_difference(old_state[name], new_state[name])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return dict(zip(names, pool.map(encode, names), strict=True))


def encode_difference(old_tensor: torch.Tensor, new_tensor: torch.Tensor) -> torch.Tensor:
    """Return the compressed difference, uint8 [n], of tensors of the same type and shape."""
    difference = view_bytes(old_tensor) ^ view_bytes(new_tensor)
    grouped_bytes = np.ascontiguousarray(difference.reshape(-1, new_tensor.itemsize).T)
    frame = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(grouped_bytes.data)
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def decode_difference(old_tensor: torch.Tensor, frame: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `encode_difference` got as `new_tensor`.

    Raises:
        ValueError: the difference is of a tensor of another size, or damaged.
    """
    num_bytes = old_tensor.numel() * old_tensor.itemsize
    compressed_bytes = view_bytes(frame).data
    # The frame contains the size that will be allocated, so this size is checked first.
    frame_bytes = zstandard.frame_content_size(compressed_bytes)
    if frame_bytes != num_bytes:
        raise ValueError(f"the difference has {frame_bytes} bytes, the tensor has {num_bytes}")
    decompressed_bytes = zstandard.ZstdDecompressor().decompress(compressed_bytes)
    grouped_bytes = np.frombuffer(decompressed_bytes, dtype=np.uint8)
    difference = np.ascontiguousarray(grouped_bytes.reshape(old_tensor.itemsize, -1).T).reshape(-1)
    return restore_tensor(difference ^ view_bytes(old_tensor), old_tensor.dtype, old_tensor.shape)


def apply_delta(state: StateDict, state_hash: str, delta: Payload) -> dict[str, torch.Tensor]:
    """Return the tensors of the delta's version; unchanged tensors are the same objects.

    Raises:
        WeightSyncError: `state` is not the version that the delta builds on, or it is damaged.
    """
    if delta.parent_hash != state_hash:
        raise WeightSyncError(
            f"weights version {delta.version} is a difference from {delta.parent_hash} and cannot "
            f"be applied to {state_hash}; apply it to its parent, once, or fetch the newest "
            "complete version"
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
    """Return the elements as uint8 [num_bytes], row-major; a view if the tensor is contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def restore_tensor(
    tensor_bytes: np.ndarray, dtype: torch.dtype, shape: Sequence[int] | torch.Size
) -> torch.Tensor:
    """Return the tensor that `view_bytes` converted to these bytes, as a view of them."""
    if tensor_bytes.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # Ray's shared memory is read-only, and fetched weights are never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(tensor_bytes).view(dtype).reshape(shape)


def _parse_buffers(buffers: Sequence[np.ndarray]) -> Payload:
    first_buffer = buffers[0]
    header_length = int.from_bytes(first_buffer[:_LENGTH_BYTES].tobytes(), "little")
    if not 0 < header_length <= min(_MAX_HEADER_BYTES, first_buffer.nbytes - _LENGTH_BYTES):
        raise ValueError(f"the header length is {header_length} bytes")
    data_start = _LENGTH_BYTES + header_length
    header = json.loads(first_buffer[_LENGTH_BYTES:data_start].tobytes())
    metadata = header.pop("__metadata__")
    # A single buffer contains all parts. Otherwise, each buffer after the first is a part.
    part_buffers = dict(zip(header, buffers[1:], strict=True)) if len(buffers) > 1 else {}
    payload_bytes = first_buffer[data_start:]
    parts: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        if len(buffers) == 1 and not 0 <= start <= end <= payload_bytes.nbytes:
            raise ValueError(f"'{name}' would end at byte {end} of {payload_bytes.nbytes}")
        part_buffer = part_buffers.get(name, payload_bytes[start:end])
        parts[name] = _restore_part(part_buffer, entry["dtype"], entry["shape"])
    parent_hash = metadata.get("parent_hash")
    return Payload(int(metadata["version"]), metadata["content_hash"], parent_hash, parts)


def _restore_part(part_buffer: np.ndarray, type_code: str, shape: list[int]) -> torch.Tensor:
    dtype = _DTYPE_BY_CODE[type_code]
    if part_buffer.nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{part_buffer.nbytes} bytes do not match type {type_code} and shape {shape}"
        )
    return restore_tensor(part_buffer, dtype, shape)


def _make_entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    tensor_bytes = view_bytes(tensor)
    digest = blake3(tensor_bytes.data, max_threads=torch.get_num_threads())
    checksum = digest.hexdigest(length=_DIGEST_BYTES)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, dtype, tuple(tensor.shape), tensor_bytes.nbytes, checksum)


def _hash_content(entries: tuple[TensorEntry, ...]) -> str:
    digest = blake3()
    for entry in entries:
        digest.update(f"{entry.name} {entry.dtype} {entry.shape} {entry.checksum}\n".encode())
    return digest.hexdigest(length=_DIGEST_BYTES)

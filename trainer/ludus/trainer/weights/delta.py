"""The difference between two versions, and its application.

    old bits ^ new bits  ->  bytes grouped by significance  ->  zstd level 1

A small step leaves most bfloat16 weights unchanged, bit for bit, and in the others it leaves sign
and exponent unchanged, so their difference is zero there. Grouping the bytes by significance puts
these zeros next to each other. A list of changed elements with their new values was measured to be
larger (see `bench/weights.py`), and needs a second format.

A bitwise difference reverts itself when it is applied twice, so it must be applied to the right
version: `apply_delta` refuses any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import zstandard

from ludus.proto.errors import WeightSyncError
from ludus.trainer.core.interfaces import StateDict
from ludus.trainer.weights.manifest import from_raw_bytes, raw_bytes
from ludus.trainer.weights.payload import Payload

_LEVEL = 1


def encode_delta(old: StateDict, new: StateDict, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the compressed differences of the named tensors, which both versions have."""

    def encode(name: str) -> torch.Tensor:
        return encode_difference(old[name], new[name])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return dict(zip(names, pool.map(encode, names), strict=True))


def encode_difference(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return uint8 [n] the compressed difference of tensors of the same type and shape."""
    difference = raw_bytes(old) ^ raw_bytes(new)
    grouped = np.ascontiguousarray(difference.reshape(-1, new.itemsize).T)
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(grouped.data)
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def decode_difference(old: torch.Tensor, frame: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `encode_difference` got as `new`.

    Raises:
        ValueError: the difference is of a tensor of another size, or damaged.
    """
    num_bytes = old.numel() * old.itemsize
    compressed = raw_bytes(frame).data
    # The frame states its size, which decides how much memory is allocated, so check it first.
    frame_bytes = zstandard.frame_content_size(compressed)
    if frame_bytes != num_bytes:
        raise ValueError(f"the difference has {frame_bytes} bytes, the tensor has {num_bytes}")
    grouped = np.frombuffer(zstandard.ZstdDecompressor().decompress(compressed), dtype=np.uint8)
    difference = np.ascontiguousarray(grouped.reshape(old.itemsize, -1).T).reshape(-1)
    return from_raw_bytes(difference ^ raw_bytes(old), old.dtype, old.shape)


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

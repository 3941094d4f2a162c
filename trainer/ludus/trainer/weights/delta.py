"""What has changed between two versions, and the way back.

    old bits ^ new bits  ->  bytes of equal rank beside each other  ->  zstd level 1

A small step leaves most bfloat16 weights as they were, bit for bit, and in the others the sign
and the exponent: their difference is zeros. Sorting the bytes by rank puts these zeros beside
each other. Naming the changed elements and their new values was measured to be larger
(`bench/weights.py` has the figures), and needs a second format.

A difference of bits undoes itself when it is applied twice, so what it is applied to must be
known: `apply_delta` refuses any other version.
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
    """The differences of the named tensors, which both versions have."""

    def encode(name: str) -> torch.Tensor:
        return encode_difference(old[name], new[name])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return dict(zip(names, pool.map(encode, names), strict=True))


def encode_difference(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """uint8 [n]: what turns `old` into `new`, which have the same type and shape."""
    difference = raw_bytes(old) ^ raw_bytes(new)
    by_rank = np.ascontiguousarray(difference.reshape(-1, new.itemsize).T)
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(by_rank.data)
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def decode_difference(old: torch.Tensor, frame: torch.Tensor) -> torch.Tensor:
    """The tensor that `encode_difference` saw as `new`.

    Raises:
        ValueError: the difference is of a tensor of another size, or altered.
    """
    num_bytes = old.numel() * old.itemsize
    packed = raw_bytes(frame).data
    # What a frame claims decides how much memory is taken, so it is looked at first.
    claimed = zstandard.frame_content_size(packed)
    if claimed != num_bytes:
        raise ValueError(f"it is of {claimed} bytes, the tensor has {num_bytes}")
    by_rank = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), dtype=np.uint8)
    difference = np.ascontiguousarray(by_rank.reshape(old.itemsize, -1).T).reshape(-1)
    return from_raw_bytes(difference ^ raw_bytes(old), old.dtype, old.shape)


def apply_delta(state: StateDict, state_hash: str, delta: Payload) -> dict[str, torch.Tensor]:
    """The tensors of the delta's version; those that did not change are the same objects.

    Raises:
        WeightSyncError: `state` is not the version that the delta builds on, or it is altered.
    """
    if delta.parent_hash != state_hash:
        raise WeightSyncError(
            f"weights version {delta.version} is a difference from {delta.parent_hash}, got "
            f"weights {state_hash} to apply it to; apply it to its parent, once, or fetch the "
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

"""Describes a version of the weights so that its arrival can be proven."""

from __future__ import annotations

import hashlib

import torch

from ludus.proto.errors import WeightSyncError
from ludus.trainer.interfaces import StateDict
from ludus.trainer.types import Probe, TensorEntry, WeightManifest

_DIGEST_BYTES = 16


def make_manifest(
    version: int, state: StateDict, probe: Probe, probe_logprobs: list[float]
) -> WeightManifest:
    """The manifest of `state` as version `version`."""
    entries = tuple(_entry(name, tensor) for name, tensor in sorted(state.items()))
    return WeightManifest(version, entries, _content_hash(entries), probe, tuple(probe_logprobs))


def verify(manifest: WeightManifest, state: StateDict) -> None:
    """Nothing.

    Raises:
        WeightSyncError: a tensor is missing, unknown, of another shape, or altered.
    """
    published = {entry.name: entry for entry in manifest.tensors}
    if published.keys() != state.keys():
        raise WeightSyncError(
            f"weights version {manifest.version}: expected {len(published)} tensors, got "
            f"{len(state)}; they differ in {sorted(published.keys() ^ state.keys())[:5]}"
        )
    for name, tensor in state.items():
        if _entry(name, tensor) != published[name]:
            raise WeightSyncError(
                f"weights version {manifest.version}: tensor '{name}' arrived altered (checksum "
                f"or shape {tuple(tensor.shape)} differs); check the weight store"
            )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order, without a copy where it is contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    data = tensor_bytes(tensor)
    checksum = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, dtype, tuple(tensor.shape), data.nbytes, checksum)


def _content_hash(entries: tuple[TensorEntry, ...]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for entry in entries:
        digest.update(f"{entry.name} {entry.dtype} {entry.shape} {entry.checksum}\n".encode())
    return digest.hexdigest()

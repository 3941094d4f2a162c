"""Manifests, which describe a version of the weights so that its arrival can be proven.

The manifest is sent through Ray, separately from the tensors. Its checksums are BLAKE3, so a
program with write access to the folder or bucket still cannot give other weights to the workers.
A checksum costs about as much as a copy of the tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from blake3 import blake3

from ludus.proto.errors import WeightSyncError
from ludus.trainer.core.interfaces import StateDict
from ludus.trainer.core.types import ScoringRequest, TensorEntry, WeightManifest

_DIGEST_BYTES = 16


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

    Args:
        manifest: published version.
        state: tensors to check.
        verified: entries of tensors that were already verified, and not written to since; only
            those in `changed` are checked again. None checks all tensors.
        changed: names of tensors that have changed since.

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


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return uint8 [bytes] the elements in row-major order; a view if the tensor is contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy()


def from_raw_bytes(
    raw: np.ndarray, dtype: torch.dtype, shape: Sequence[int] | torch.Size
) -> torch.Tensor:
    """Return the tensor from which `raw_bytes` made these bytes; a view of them."""
    if raw.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # Ray's shared memory is read-only, and fetched weights are never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(raw).view(dtype).reshape(shape)


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    data = raw_bytes(tensor)
    digest = blake3(data.data, max_threads=torch.get_num_threads())
    checksum = digest.hexdigest(length=_DIGEST_BYTES)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, dtype, tuple(tensor.shape), data.nbytes, checksum)


def _content_hash(entries: tuple[TensorEntry, ...]) -> str:
    digest = blake3()
    for entry in entries:
        digest.update(f"{entry.name} {entry.dtype} {entry.shape} {entry.checksum}\n".encode())
    return digest.hexdigest(length=_DIGEST_BYTES)

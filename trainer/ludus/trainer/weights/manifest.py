"""Describes a version of the weights so that its arrival can be proven.

The manifest travels apart from the tensors, through Ray. Its checksums are BLAKE3: whoever can
write into a folder or a bucket still cannot hand other weights to the workers, and a checksum
costs about as much as copying the tensor.
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
    """The tensors as they travel: floating-point ones in `dtype`, contiguous, on the CPU."""
    wanted = getattr(torch, dtype)
    return {
        name: (tensor.to(wanted) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in state.items()
    }


def make_manifest(
    version: int,
    state: StateDict,
    canary: Sequence[ScoringRequest],
    canary_logprobs: Sequence[Sequence[float]],
) -> WeightManifest:
    """The manifest of `state` as version `version`."""
    entries = tuple(_entry(name, tensor) for name, tensor in sorted(state.items()))
    answers = tuple(tuple(answer) for answer in canary_logprobs)
    return WeightManifest(version, entries, _content_hash(entries), tuple(canary), answers)


def verify(
    manifest: WeightManifest,
    state: StateDict,
    known: Mapping[str, TensorEntry] | None = None,
    altered: Collection[str] = (),
) -> None:
    """Compare the tensors with those that were published.

    Args:
        known: entries of tensors that were verified before and not written to since, so that
            only those in `altered` must be read again; None reads all.

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
        seen = None if known is None or name in altered else known.get(name)
        if (seen or _entry(name, tensor)) != published[name]:
            raise WeightSyncError(
                f"weights version {manifest.version}: tensor '{name}' arrived altered (checksum "
                f"or shape {tuple(tensor.shape)} differs); check the weight store"
            )


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """uint8 [bytes]: the elements in row-major order, without a copy where it is contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy()


def from_raw_bytes(
    raw: np.ndarray, dtype: torch.dtype, shape: Sequence[int] | torch.Size
) -> torch.Tensor:
    """The tensor of which `raw_bytes` made these; a view of them."""
    if raw.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # What lies in Ray's shared memory is read-only, and stays so: nobody writes to weights.
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

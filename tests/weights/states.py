"""Tensors, manifests and stores for the tests of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ludus.proto.config import FolderWeightStore, WeightStoreConfig
from ludus.trainer.core.interfaces import PublishedWeights, StateDict
from ludus.trainer.core.types import ScoringRequest, WeightManifest
from ludus.trainer.weights.payload import make_manifest
from ludus.trainer.weights.store import VersionStore

CANARY_PROMPT = ScoringRequest([1, 2], [3])


def make_state(version: int) -> dict[str, torch.Tensor]:
    """Return tensors of several types and shapes, different for each version."""
    generator = torch.Generator().manual_seed(version)
    return {
        "matrix": torch.randn(5, 7, generator=generator),
        "half": torch.randn(6, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(float(version)),
        # A view whose elements are not in row-major order.
        "transposed": torch.randn(4, 3, generator=generator).T,
        "constant": torch.arange(11),
    }


def make_version_manifest(version: int, state: StateDict | None = None) -> WeightManifest:
    """Return the manifest of a version."""
    return make_manifest(
        version, make_state(version) if state is None else state, [CANARY_PROMPT], [[-1.0]]
    )


def publish(store: VersionStore, version: int, state: StateDict | None = None) -> PublishedWeights:
    """Publish a version."""
    state = make_state(version) if state is None else state
    return store.publish(make_version_manifest(version, state), state)


def assert_same(state: StateDict, expected_state: StateDict) -> None:
    """Assert that both are equal bit for bit."""
    assert state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor)


def make_settings(**fields: Any) -> WeightStoreConfig:
    """Return a store's settings, with a time limit long enough for a slow machine."""
    return FolderWeightStore(**{"timeout_s": 60.0, **fields})


class MemoryStorage:
    """Storage in this process that records calls and can be unavailable."""

    description = "memory"

    def __init__(self) -> None:
        self.files: dict[str, np.ndarray] = {}
        self.read_names: list[str] = []
        self.failures: list[Exception] = []
        """Errors that the next calls raise, one each."""

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> str:
        """See StorageBackend."""
        self._raise_failure()
        self.files[name] = np.concatenate(buffers)
        return name

    def get(self, location: str, num_bytes: int) -> list[np.ndarray]:
        """See StorageBackend."""
        self._raise_failure()
        self.read_names.append(location)
        return [self.files[location].copy()]

    def drop(self, location: str) -> None:
        """See StorageBackend."""
        del self.files[location]

    def list_locations(self) -> list[str]:
        """See StorageBackend."""
        return list(self.files)

    def _raise_failure(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

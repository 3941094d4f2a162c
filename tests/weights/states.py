"""Tensors, manifests and stores for the tests of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ludus.proto.config import FolderWeightStore, WeightStoreConfig
from ludus.trainer.core.interfaces import PublishedWeights, StateDict
from ludus.trainer.core.types import ScoringRequest, WeightManifest
from ludus.trainer.weights import VersionStore, make_manifest

CANARY_PROMPT = ScoringRequest([1, 2], [3])


def make_state(version: int) -> dict[str, torch.Tensor]:
    """Tensors of several types and shapes that differ between versions."""
    noise = torch.Generator().manual_seed(version)
    return {
        "matrix": torch.randn(5, 7, generator=noise),
        "half": torch.randn(6, generator=noise).to(torch.bfloat16),
        "scalar": torch.tensor(float(version)),
        # A view: its elements do not lie in row-major order.
        "transposed": torch.randn(4, 3, generator=noise).T,
        "constant": torch.arange(11),
    }


def manifest_of(version: int, state: StateDict | None = None) -> WeightManifest:
    """The manifest of a version."""
    return make_manifest(
        version, make_state(version) if state is None else state, [CANARY_PROMPT], [[-1.0]]
    )


def publish(store: VersionStore, version: int, state: StateDict | None = None) -> PublishedWeights:
    """The version, published."""
    state = make_state(version) if state is None else state
    return store.publish(manifest_of(version, state), state)


def assert_same(fetched: StateDict, expected: StateDict) -> None:
    """Assert that both are equal bit for bit."""
    assert fetched.keys() == expected.keys()
    for name, tensor in expected.items():
        assert fetched[name].dtype == tensor.dtype
        assert torch.equal(fetched[name], tensor)


def settings(**fields: Any) -> WeightStoreConfig:
    """A store's settings, with a time limit that no slow machine reaches."""
    return FolderWeightStore(**{"timeout_s": 60.0, **fields})


class MemoryStorage:
    """Storage in this process that counts what is asked of it, and can be away."""

    place = "memory"

    def __init__(self) -> None:
        self.files: dict[str, np.ndarray] = {}
        self.got: list[str] = []
        self.failures: list[Exception] = []
        """Raised by the next calls, one each."""

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> str:
        """See StorageBackend."""
        self._fail()
        self.files[name] = np.concatenate(buffers)
        return name

    def get(self, location: str, num_bytes: int) -> list[np.ndarray]:
        """See StorageBackend."""
        self._fail()
        self.got.append(location)
        return [self.files[location].copy()]

    def drop(self, location: str) -> None:
        """See StorageBackend."""
        del self.files[location]

    def leftovers(self) -> list[str]:
        """See StorageBackend."""
        return list(self.files)

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

"""A weight store in Ray's object store."""

from __future__ import annotations

from collections import deque

import ray

from ludus.proto.errors import WeightSyncError
from ludus.trainer.interfaces import PublishedWeights, StateDict
from ludus.trainer.types import WeightManifest
from ludus.trainer.weights import verify


class RayStore:
    """Versions as objects that the publishing process owns.

    Workers map the same shared memory, so a version is copied once per machine. The object
    lives as long as this store holds its reference; a worker that fetches while the version
    is dropped holds one of its own.
    """

    def __init__(self, keep_versions: int = 2) -> None:
        self._kept: deque[ray.ObjectRef] = deque(maxlen=keep_versions)

    def publish(self, manifest: WeightManifest, state: StateDict) -> PublishedWeights:
        """The version, complete and fetchable; older ones beyond the retention are dropped."""
        reference = ray.put(dict(state))
        self._kept.append(reference)
        # In a list Ray hands on the reference itself instead of the object behind it.
        return PublishedWeights(manifest, [reference])

    def fetch(self, published: PublishedWeights) -> StateDict:
        """The tensors as they were published."""
        try:
            state: StateDict = ray.get(published.location[0])
        except ray.exceptions.RayError as error:
            raise WeightSyncError(
                f"weights version {published.manifest.version} are gone from the object store: "
                f"{error}; raise weights.keep_versions or see why the learner died"
            ) from error
        verify(published.manifest, state)
        return state

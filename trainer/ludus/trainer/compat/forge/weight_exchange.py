"""Transfer of weights from an RLTrainer to Generators of the same process, as Forge's torchstore.

    RLTrainer.push_weights(v) --checksums, canary--> files --verify--> Generator.update_weights(v)

Versions, files and canary prompts are those of a run (`ludus.trainer.weights`).
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from ludus.proto.config import FolderWeightStore
from ludus.proto.errors import WeightSyncError
from ludus.trainer.core.interfaces import FetchedWeights, PublishedWeights, StateDict
from ludus.trainer.core.types import WeightManifest
from ludus.trainer.weights.folder import FolderFiles
from ludus.trainer.weights.store import VersionStore


class WeightExchange:
    """The latest versions of pushed weights."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ludus-weights-")
        self._config = FolderWeightStore(path=self._folder.name)
        self._store = VersionStore(FolderFiles(Path(self._folder.name)), self._config)
        self._published: dict[int, PublishedWeights] = {}

    def push(self, manifest: WeightManifest, state: StateDict) -> None:
        """Publish a version; a few earlier versions are kept."""
        # A second training in this process starts with small version numbers again.
        self._published.pop(manifest.version, None)
        self._published[manifest.version] = self._store.publish(manifest, state)
        for version in list(self._published)[: -self._config.keep_versions]:
            del self._published[version]

    def pull(self, version: int) -> tuple[WeightManifest, FetchedWeights]:
        """Return a version after verifying its checksums.

        Raises:
            WeightSyncError: the version was never pushed or is no longer kept.
        """
        published_weights = self._published.get(version)
        if published_weights is None:
            raise WeightSyncError(
                f"weights version {version} is not available; available versions: "
                f"{sorted(self._published)}; call push_weights with it first"
            )
        return published_weights.manifest, self._store.fetch(published_weights)


@functools.cache
def process_exchange() -> WeightExchange:
    """Return the exchange of this process, whose files are deleted at exit."""
    return WeightExchange()

"""How weights get from an RLTrainer to the Generators of the same process: Forge's torchstore.

    RLTrainer.push_weights(v) --checksums, canary--> files --checked--> Generator.update_weights(v)

They are the versions, files and canary prompts of a run (`ludus.trainer.weights`).
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from ludus.proto.config import FolderWeightStore
from ludus.proto.errors import WeightSyncError
from ludus.trainer.core.interfaces import FetchedWeights, PublishedWeights, StateDict
from ludus.trainer.core.types import WeightManifest
from ludus.trainer.weights import VersionStore
from ludus.trainer.weights.folder import FolderFiles


class WeightExchange:
    """The versions of weights that were pushed last."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ludus-weights-")
        self._config = FolderWeightStore(path=self._folder.name)
        self._store = VersionStore(FolderFiles(Path(self._folder.name)), self._config)
        self._published: dict[int, PublishedWeights] = {}

    def push(self, manifest: WeightManifest, state: StateDict) -> None:
        """Publish a version; of those pushed before it a few stay."""
        # Whoever trains once more in this process begins with small numbers again.
        self._published.pop(manifest.version, None)
        self._published[manifest.version] = self._store.publish(manifest, state)
        for version in list(self._published)[: -self._config.keep_versions]:
            del self._published[version]

    def pull(self, version: int) -> tuple[WeightManifest, FetchedWeights]:
        """A version, whose checksums are right.

        Raises:
            WeightSyncError: it was never pushed, or is gone.
        """
        published = self._published.get(version)
        if published is None:
            raise WeightSyncError(
                f"weights version {version} is not there; expected one of "
                f"{sorted(self._published)}: call push_weights with it first"
            )
        return published.manifest, self._store.fetch(published)


@functools.cache
def process_exchange() -> WeightExchange:
    """The one of this process; its files go with the process."""
    return WeightExchange()

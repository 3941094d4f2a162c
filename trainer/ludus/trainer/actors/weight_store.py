"""The weight store that a configuration names, and the one that lies in Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import ray

from ludus.proto.config import FolderWeightStore, RayWeightStore, S3WeightStore, WeightStoreConfig
from ludus.proto.errors import WeightSyncError
from ludus.trainer.weights.folder import FolderFiles
from ludus.trainer.weights.store import StorageBackend, VersionStore


def make_store(config: WeightStoreConfig) -> VersionStore:
    """The store that the configuration names, once `located` has said where it lies."""
    return VersionStore(_make_backend(config), config)


def located(config: WeightStoreConfig, run_path: Path, run_id: str) -> WeightStoreConfig:
    """The configuration with a place that no other run uses, told from every machine.

    Runs in different folders may have one name, and each removes what it finds in its place.
    """
    place = f"{run_path.name}-{run_id}"
    match config:
        case FolderWeightStore():
            path = Path(config.path) / place if config.path else run_path / "weights"
            return config.model_copy(update={"path": str(path.absolute())})
        case S3WeightStore():
            prefix = "/".join(part for part in (config.prefix.strip("/"), place) if part)
            return config.model_copy(update={"prefix": prefix})
    return config


def check_reachable(config: WeightStoreConfig) -> None:
    """Check that a bucket answers, before anything heavy starts.

    Raises:
        ConfigError: it does not.
    """
    if isinstance(config, S3WeightStore):
        from ludus.trainer.weights.bucket import BucketObjects

        BucketObjects(config).check()


def _make_backend(config: WeightStoreConfig) -> StorageBackend:
    match config:
        case RayWeightStore():
            return RayObjects()
        case FolderWeightStore():
            assert config.path is not None
            return FolderFiles(Path(config.path))
        case S3WeightStore():
            # Imported where it is wanted: it starts threads of its own.
            from ludus.trainer.weights.bucket import BucketObjects

            return BucketObjects(config)


class RayObjects:
    """Versions as objects that the publishing process owns.

    Workers map the same shared memory, so a version is copied once per machine. An object lives
    as long as somebody holds its reference: the store, for versions that it keeps, and a worker
    that fetches one.
    """

    place = "Ray's object store"

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> list[ray.ObjectRef]:
        """The reference, in a list: in one, Ray hands on itself instead of what it refers to."""
        try:
            return [ray.put(list(buffers))]
        except ray.exceptions.RayError as error:
            raise WeightSyncError(
                f"{self.place} takes no {name}: {error}; give Ray more memory, or set "
                "weights.kind = 'folder'"
            ) from error

    def get(self, location: list[ray.ObjectRef], num_bytes: int) -> Sequence[np.ndarray]:
        """The buffers, in shared memory."""
        try:
            buffers: list[np.ndarray] = ray.get(location[0])
        except ray.exceptions.RayError as error:
            raise WeightSyncError(
                f"{self.place} has lost them: {error}; see why the learner died"
            ) from error
        return buffers

    def drop(self, location: list[ray.ObjectRef]) -> None:
        """Do nothing: the last reference goes with the store's own."""

    def leftovers(self) -> Sequence[list[ray.ObjectRef]]:
        """None: objects end with the process that owns them."""
        return ()

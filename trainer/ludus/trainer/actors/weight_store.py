"""The configured weight store, and the storage backend for Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import ray

from ludus.proto.config import FolderWeightStore, RayWeightStore, S3WeightStore, WeightStoreConfig
from ludus.proto.errors import WeightSyncError
from ludus.trainer.weights.folder import FolderStorage
from ludus.trainer.weights.store import StorageBackend, VersionStore


def make_store(config: WeightStoreConfig) -> VersionStore:
    """Build the store from a configuration that `resolve_location` returned."""
    match config:
        case RayWeightStore():
            return VersionStore(RayStorage(), config)
        case FolderWeightStore():
            assert config.path is not None
            return VersionStore(FolderStorage(Path(config.path)), config)
        case S3WeightStore():
            # Imported only when needed, because obstore starts threads.
            from ludus.trainer.weights.bucket import BucketStorage

            return VersionStore(BucketStorage(config), config)


def resolve_location(config: WeightStoreConfig, run_path: Path, run_id: str) -> WeightStoreConfig:
    """Return the configuration with an absolute location that no other run uses.

    Runs in different folders may have the same name, and each run deletes old versions at its
    location, so the name alone is not enough.
    """
    name = f"{run_path.name}-{run_id}"
    match config:
        case FolderWeightStore():
            path = Path(config.path) / name if config.path else run_path / "weights"
            return config.model_copy(update={"path": str(path.absolute())})
        case S3WeightStore():
            prefix = f"{config.prefix.strip('/')}/{name}".lstrip("/")
            return config.model_copy(update={"prefix": prefix})
    return config


def check_reachable(config: WeightStoreConfig) -> None:
    """Check that a bucket responds, before anything expensive starts.

    Raises:
        ConfigError: the bucket does not respond.
    """
    if isinstance(config, S3WeightStore):
        from ludus.trainer.weights.bucket import BucketStorage

        BucketStorage(config).check()


class RayStorage(StorageBackend):
    """A storage backend of Ray objects that the publishing process owns.

    Workers map the same shared memory, so a version is copied once per machine. An object lives as
    long as a reference exists: in the store, for kept versions, or in a worker that fetches it.
    """

    description = "Ray's object store"

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> list[ray.ObjectRef]:
        """Store the buffers, and return the reference in a list.

        In a list, Ray passes the reference to other processes, instead of the object.
        """
        try:
            return [ray.put(list(buffers))]
        except ray.exceptions.RayError as error:
            raise WeightSyncError(
                f"{self.description} cannot store {name}: {error}; give Ray more memory, or set "
                "weights.kind = 'folder'"
            ) from error

    def get(self, location: list[ray.ObjectRef], num_bytes: int) -> Sequence[np.ndarray]:
        """Return the buffers, in shared memory."""
        try:
            return ray.get(location[0])
        except ray.exceptions.RayError as error:
            raise WeightSyncError(
                f"{self.description} has lost the weights: {error}; check why the learner died"
            ) from error

    def drop(self, location: list[ray.ObjectRef]) -> None:
        """Do nothing, because Ray deletes the object when the store drops the last reference."""

    def list_locations(self) -> Sequence[list[ray.ObjectRef]]:
        """Return an empty list, because Ray deletes objects with the process that owns them."""
        return ()

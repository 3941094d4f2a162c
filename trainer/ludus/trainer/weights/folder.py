"""Versions as files in a folder that learner and workers share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ludus.proto.errors import StoreUnavailableError, WeightSyncError
from ludus.trainer.weights.store import StorageBackend


class FolderStorage(StorageBackend):
    """A storage backend with one file for each version; a file appears only when complete.

    Plain file calls are three times as fast as a general object-store library. Mapping the file
    would be even faster, but a reader dies if a file that it has mapped is removed from a shared
    folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.description = f"the folder '{folder}'"
        self._is_created = False

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> str:
        partial_path = self._folder / f"{name}.partial"
        try:
            if not self._is_created:
                # Create it only once. A folder that disappears later may come back.
                self._folder.mkdir(parents=True, exist_ok=True)
                self._is_created = True
            with partial_path.open("wb") as file:
                for buffer in buffers:
                    file.write(buffer.data)
            os.replace(partial_path, self._folder / name)
        except OSError as error:
            raise self._make_error(error) from error
        return name

    def get(self, location: str, num_bytes: int) -> list[np.ndarray]:
        path = self._folder / location
        # Unlike Path.is_dir, os.path.isdir does not raise if the folder is out of order.
        has_folder = os.path.isdir(self._folder)
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != num_bytes:
                    raise WeightSyncError(
                        f"'{path}' has {size} bytes instead of {num_bytes}; every rollout worker "
                        "must see the folder weights.path as the learner does"
                    )
                content = np.empty(num_bytes, dtype=np.uint8)
                view, start = memoryview(content.data), 0
                while start < num_bytes and (num_read := file.readinto(view[start:])):
                    start += num_read
        except FileNotFoundError as error:
            if has_folder and os.path.isdir(self._folder):
                raise WeightSyncError(
                    f"{self.description} has no '{location}'; every rollout worker must see the "
                    "folder weights.path, and a slow one may need more weights.keep_versions"
                ) from error
            raise self._make_error(error) from error
        except OSError as error:
            raise self._make_error(error) from error
        return [content[:start]]

    def drop(self, location: str) -> None:
        try:
            (self._folder / location).unlink()
        except FileNotFoundError as error:
            if not os.path.isdir(self._folder):
                # The file comes back with the folder.
                raise self._make_error(error) from error

    def list_locations(self) -> list[str]:
        """Return the names of all files of versions, complete or not."""
        return [path.name for path in self._folder.glob("v*-*.safetensors*")]

    def _make_error(self, error: OSError) -> WeightSyncError:
        reason = f"{self.description}: {error.strerror or error}"
        if isinstance(error, PermissionError):
            return WeightSyncError(
                f"{reason}; the user that runs learner and workers must be able to read and "
                "write weights.path"
            )
        return StoreUnavailableError(reason)

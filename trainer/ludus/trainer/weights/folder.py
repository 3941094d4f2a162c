"""Versions as files in a folder that learner and workers share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ludus.proto.errors import StoreUnavailableError, WeightSyncError


class FolderFiles:
    """One file for each version, written aside and renamed: there is all of it, or none.

    Plain files, because a general object-store library reads and writes local ones at a third
    of the speed. A mapped file would be faster still, but a shared folder may take a dropped
    file away under its reader, which then dies of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = False

    @property
    def place(self) -> str:
        """What messages call it."""
        return f"the folder '{self._folder}'"

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> str:
        """Where the file lies."""
        target = self._folder / name
        aside = self._folder / f"{name}.partial"
        try:
            if not self._made:
                # Only once: a folder that vanishes later is unavailable, and will come back.
                self._folder.mkdir(parents=True, exist_ok=True)
                self._made = True
            with aside.open("wb") as file:
                for buffer in buffers:
                    file.write(buffer.data)
            os.replace(aside, target)
        except OSError as error:
            raise self._failure(error) from error
        return name

    def get(self, location: str, num_bytes: int) -> list[np.ndarray]:
        """The file's bytes."""
        path = self._folder / location
        # Unlike Path.is_dir, this one answers also where the folder is out of order.
        was_there = os.path.isdir(self._folder)
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != num_bytes:
                    raise WeightSyncError(
                        f"'{path}' was cut off: expected {num_bytes} bytes, got {size}; every "
                        "rollout worker must see the folder weights.path as the learner does"
                    )
                content = np.empty(num_bytes, dtype=np.uint8)
                view, start = memoryview(content.data), 0
                while start < num_bytes and (num_read := file.readinto(view[start:])):
                    start += num_read
        except FileNotFoundError as error:
            if was_there and os.path.isdir(self._folder):
                raise WeightSyncError(
                    f"{self.place} has no '{location}'; every rollout worker must see the folder "
                    "weights.path, and a slow one may need more weights.keep_versions"
                ) from error
            raise self._failure(error) from error
        except OSError as error:
            raise self._failure(error) from error
        return [content[:start]]

    def drop(self, location: str) -> None:
        """Delete the file, if it is there."""
        try:
            (self._folder / location).unlink()
        except FileNotFoundError as error:
            if not os.path.isdir(self._folder):
                # It comes back with the folder.
                raise self._failure(error) from error

    def leftovers(self) -> list[str]:
        """Files of earlier processes, whole or not."""
        return [path.name for path in self._folder.glob("v*-*.safetensors*")]

    def _failure(self, error: OSError) -> WeightSyncError:
        reason = f"{self.place}: {error.strerror or error}"
        if isinstance(error, PermissionError):
            return WeightSyncError(
                f"{reason}; the user that runs learner and workers must be able to read and "
                "write weights.path"
            )
        return StoreUnavailableError(reason)

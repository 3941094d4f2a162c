"""A weight store in a folder that learner and workers share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ludus.proto.errors import WeightSyncError
from ludus.trainer.interfaces import PublishedWeights, StateDict
from ludus.trainer.types import WeightManifest
from ludus.trainer.weights.manifest import verify

_TENSORS_FILE = "weights.safetensors"


class FolderStore:
    """Versions as `v<number>/weights.safetensors`.

    A version is written aside and renamed, so a reader sees all of it or nothing. A version
    may only be dropped when no worker still fetches it, so at least two stay.
    """

    def __init__(self, folder: Path, keep_versions: int = 2) -> None:
        self._folder = folder
        self._keep_versions = keep_versions
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, manifest: WeightManifest, state: StateDict) -> PublishedWeights:
        """The version, complete and fetchable; older ones beyond the retention are dropped."""
        target = self._version_folder(manifest.version)
        aside = target.with_suffix(".partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        save_file(
            {name: tensor.contiguous() for name, tensor in state.items()}, aside / _TENSORS_FILE
        )
        # A resumed run publishes some versions again.
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
        self._drop_others(manifest.version)
        return PublishedWeights(manifest, str(target))

    def fetch(self, published: PublishedWeights) -> StateDict:
        """The tensors as they were published."""
        path = Path(published.location) / _TENSORS_FILE
        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"weights version {published.manifest.version} cannot be read from '{path}': "
                f"{error}; every rollout worker must see the folder weights.path"
            ) from error
        verify(published.manifest, state)
        return state

    def _version_folder(self, version: int) -> Path:
        return self._folder / f"v{version:08d}"

    def _drop_others(self, newest: int) -> None:
        """Nothing; a run that went on from a checkpoint leaves later versions behind, too."""
        kept = {self._version_folder(newest - age) for age in range(self._keep_versions)}
        for path in self._folder.glob("v*"):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

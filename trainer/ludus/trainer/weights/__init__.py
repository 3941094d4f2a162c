"""Weights from learner to sampler: manifest, checksums, stores."""

from ludus.trainer.weights.canary import CanaryReport, check_canary
from ludus.trainer.weights.folder import FolderStore
from ludus.trainer.weights.manifest import make_manifest, verify

__all__ = ["CanaryReport", "FolderStore", "check_canary", "make_manifest", "verify"]

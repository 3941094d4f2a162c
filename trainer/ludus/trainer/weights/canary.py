"""Proves after each pull that a worker samples from the weights that were published.

Checksums prove that the bytes arrived. They do not prove that the engine uses them: an engine
may keep a packed or fused copy of old weights and never say so. So the worker answers a fixed
prompt with the weights it would sample from now, and the answer's log-probs must be those that
the learner computed when it published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.trainer.types import WeightManifest

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest difference of a log-prob between two right implementations, by compute type."""


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """How far a worker's answer to the canary prompt is from the learner's."""

    version: int
    content_hash: str
    error: float
    """Largest absolute difference of a log-prob."""
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the worker may take traffic. A log-prob that is nan never may."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        return (
            f"canary of weights version {self.version} ({self.content_hash[:12]}): the worker's "
            f"canary log-probs differ from the learner's by {self.error:.3g}, allowed "
            f"{self.tolerance:g}; it does not sample from the published weights"
        )


def check_canary(manifest: WeightManifest, answer: Sequence[float], dtype: str) -> CanaryReport:
    """The comparison of a worker's canary log-probs with those of the manifest.

    Args:
        dtype: in which the learner and the engine compute; where tensors travelled in a coarser
            one, that one says what may differ.
    """
    pairs = zip(manifest.canary_logprobs, answer, strict=True)
    errors = [abs(expected - got) for expected, got in pairs]
    # max() would hide a nan that is not first.
    worst = max(errors) if all(error == error for error in errors) else float("nan")
    travelled = {entry.dtype for entry in manifest.tensors}
    tolerance = max(TOLERANCE.get(each, 0.0) for each in {dtype, *travelled})
    return CanaryReport(manifest.version, manifest.content_hash, worst, tolerance)


@dataclass(frozen=True, slots=True)
class WorkerWeights:
    """The weights that a worker samples from, and what it took to get them there."""

    canary: CanaryReport
    fetch_s: float
    """Until all tensors were there and checked."""
    pause_s: float
    """In which nothing was sampled: the engine loaded them and answered the canary prompt."""
    bytes_fetched: int
    """Fewer than the tensors have where differences travel."""

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.canary.version

    @property
    def content_hash(self) -> str:
        """Of the weights."""
        return self.canary.content_hash

    @property
    def canary_error(self) -> float:
        """Largest difference of a canary token's log-prob from the learner's."""
        return self.canary.error

    @property
    def ok(self) -> bool:
        """Whether the worker may take traffic."""
        return self.canary.ok

    def __str__(self) -> str:
        return str(self.canary)

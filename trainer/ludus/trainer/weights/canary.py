"""Proves after each pull that a worker samples from the weights that were published.

Checksums prove that the bytes arrived. They do not prove that the engine uses them: an engine
may keep a packed or fused copy of old weights and never say so. So the worker answers a fixed
probe with the weights it would sample from now, and the answer's log-probs must be those that
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
    """How far a worker's answer to the probe is from the learner's."""

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
            f"probe log-probs differ from the learner's by {self.error:.3g}, allowed "
            f"{self.tolerance:g}; it does not sample from the published weights"
        )


def check_canary(manifest: WeightManifest, answer: Sequence[float], dtype: str) -> CanaryReport:
    """The comparison of a worker's probe log-probs with those of the manifest."""
    pairs = zip(manifest.probe_logprobs, answer, strict=True)
    errors = [abs(expected - got) for expected, got in pairs]
    # max() would hide a nan that is not first.
    worst = max(errors) if all(error == error for error in errors) else float("nan")
    return CanaryReport(manifest.version, manifest.content_hash, worst, TOLERANCE[dtype])

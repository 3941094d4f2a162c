"""Proves after each pull that a worker samples from the weights that were published.

Checksums prove that the bytes arrived. They do not prove that the engine uses them: an engine
may keep a packed or fused copy of old weights and never say so. So the worker answers fixed
prompts with the weights it would sample from now, and the answers' log-probs must be those that
the learner computed when it published.

    learner  --answers, in the manifest-->  worker: its own answers  -->  CanaryReport
                                                                              |
    driver:  CanaryJudge, which knows what differences were usual so far  <---+

In float32 two right implementations agree to 1e-4 in every token. In bfloat16 single tokens of
right ones have been seen to differ by 0.3 nats and more (vLLM issue 18352, TRL issue 6789), so
there the mean is judged, and a jump against what was usual before counts as well as its size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ludus.proto.config import CanaryConfig
from ludus.proto.errors import CanaryError
from ludus.trainer.core.types import WeightManifest

_EXACT_TOLERANCE = 1e-4
_REDUCED_TOLERANCE = 0.5
_REDUCED_TYPES = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """How far a worker's answers to the canary prompts are from the learner's."""

    version: int
    content_hash: str
    error: float
    """Difference of log-probs, in nats, in the statistic that weights.canary names; nan where a
    log-prob is no number."""
    is_exact: bool = True
    """Whether all was computed, and travelled, in float32."""


def check_canary(
    manifest: WeightManifest, answers: Sequence[Sequence[float]], config: CanaryConfig, dtype: str
) -> CanaryReport:
    """The comparison of a worker's canary log-probs with those of the manifest.

    Args:
        answers: one to each of the manifest's canary prompts.
        dtype: in which the learner and the engine compute.
    """
    errors = sorted(
        abs(expected - got)
        for learner, worker in zip(manifest.canary_logprobs, answers, strict=True)
        for expected, got in zip(learner, worker, strict=True)
    )
    is_exact = _REDUCED_TYPES.isdisjoint({dtype, *(entry.dtype for entry in manifest.tensors)})
    error = _statistic(errors, config.quantile, is_exact=is_exact)
    return CanaryReport(manifest.version, manifest.content_hash, error, is_exact)


def _statistic(errors: Sequence[float], quantile: float | None, *, is_exact: bool) -> float:
    if not all(map(math.isfinite, errors)):
        return math.nan
    if quantile is None and not is_exact:
        return math.fsum(errors) / len(errors)
    share = 1.0 if quantile is None else quantile
    return errors[math.ceil(share * len(errors)) - 1]


class CanaryJudge:
    """Says which reports pass, of all workers of a run."""

    def __init__(self, config: CanaryConfig) -> None:
        self._config = config
        self._usual: deque[float] = deque(maxlen=config.window)
        """The newest errors that passed."""

    def allowed(self, report: CanaryReport) -> float:
        """The largest error with which the report passes."""
        default = _EXACT_TOLERANCE if report.is_exact else _REDUCED_TOLERANCE
        tolerance = self._config.tolerance or default
        if report.is_exact or not self._usual:
            return tolerance
        unusual = self._config.factor * median(self._usual)
        return min(tolerance, max(self._config.floor, unusual))

    def judge(self, report: CanaryReport, worker: int) -> None:
        """Note that the report of this worker passes.

        Raises:
            CanaryError: it does not; its worker must take no traffic.
        """
        allowed = self.allowed(report)
        # An error that is nan is not larger than anything, either.
        if not report.error <= allowed:
            raise CanaryError(
                f"canary of weights version {report.version} ({report.content_hash[:12]}): the "
                f"log-probs of rollout worker {worker} differ from the learner's by "
                f"{report.error:.3g}, allowed {allowed:.3g}; it does not sample from the "
                "published weights"
            )
        self._usual.append(report.error)


@dataclass(frozen=True, slots=True)
class WorkerWeights:
    """The weights that a worker says it samples from, and what it took to get them there."""

    canary: CanaryReport
    fetch_s: float
    """Until all tensors were there and checked."""
    pause_s: float
    """In which nothing was sampled: the engine loaded them and answered the canary prompts."""
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
        """How far the worker's canary log-probs are from the learner's, as CanaryReport has it."""
        return self.canary.error

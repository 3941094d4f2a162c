"""Proof after each fetch that a worker samples from the published weights.

Checksums prove that the bytes arrived. They do not prove that the engine uses them: an engine may
silently keep a packed or fused copy of old weights. So the worker scores fixed completions with
its current weights, and the log-probs must agree with the log-probs that the learner computed when
it published the weights.

    learner  --log-probs, in the manifest-->  worker: own log-probs  -->  CanaryReport
                                                                              |
    driver:  CanaryJudge, which records the usual differences of the run <----+

In float32, two correct implementations of a small model agree to 1e-4 in every token. Larger models
differ more, in proportion to the rounding error that the learner measures. In bfloat16, single
tokens of correct implementations may differ by 0.3 nats and more (vLLM issue 18352, TRL issue
6789), so the mean is compared. The check fails for a large difference, and for one far above the
usual difference.
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
_MAX_EXACT_TOLERANCE = 1e-2
"""Largest default tolerance in float32, however large the model's rounding error is."""
_REDUCED_TOLERANCE = 0.5
_REDUCED_TYPES = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """The difference between a worker's log-probs of the canary completions and the learner's."""

    version: int
    content_hash: str
    error: float
    """Difference of the log-probs in nats, in the statistic that weights.canary selects; NaN if a
    log-prob is not finite."""
    is_exact: bool = True
    """True if all weights were computed and published in float32."""
    rounding_error: float = 0.0
    """Largest difference of the learner's own log-probs by rounding alone, in nats."""


def check_canary(
    manifest: WeightManifest,
    worker_logprobs: Sequence[Sequence[float]],
    config: CanaryConfig,
    dtype: str,
) -> CanaryReport:
    """Compare a worker's log-probs of the canary prompts with the log-probs in the manifest.

    `dtype` is the type in which learner and engine compute.
    """
    errors: list[float] = []
    for prompt_logprobs in zip(manifest.canary_logprobs, worker_logprobs, strict=True):
        errors += [abs(first - second) for first, second in zip(*prompt_logprobs, strict=True)]
    is_exact = _REDUCED_TYPES.isdisjoint({dtype, *(entry.dtype for entry in manifest.tensors)})
    error = _compute_statistic(sorted(errors), config.quantile, is_exact=is_exact)
    return CanaryReport(
        manifest.version, manifest.content_hash, error, is_exact, manifest.rounding_error
    )


def _compute_statistic(errors: Sequence[float], quantile: float | None, *, is_exact: bool) -> float:
    if not all(map(math.isfinite, errors)):
        return math.nan
    if quantile is None and not is_exact:
        return math.fsum(errors) / len(errors)
    share = 1.0 if quantile is None else quantile
    return errors[math.ceil(share * len(errors)) - 1]


class CanaryJudge:
    """A judge that decides which reports of a run's workers pass."""

    def __init__(self, config: CanaryConfig) -> None:
        self._config = config
        self._usual_errors: deque[float] = deque(maxlen=config.window)
        """The latest errors that passed."""

    def compute_max_error(self, report: CanaryReport) -> float:
        """Return the largest error with which the report passes."""
        tolerance = self._config.tolerance or self._choose_tolerance(report)
        if report.is_exact or not self._usual_errors:
            return tolerance
        max_usual_error = self._config.factor * median(self._usual_errors)
        return min(tolerance, max(self._config.floor, max_usual_error))

    def _choose_tolerance(self, report: CanaryReport) -> float:
        """Return the tolerance of a report if none is configured."""
        if not report.is_exact:
            return _REDUCED_TOLERANCE
        max_rounding_error = self._config.factor * report.rounding_error
        return max(_EXACT_TOLERANCE, min(max_rounding_error, _MAX_EXACT_TOLERANCE))

    def check(self, report: CanaryReport, worker: int) -> None:
        """Check and record the report of a worker.

        Raises:
            CanaryError: the report does not pass, so the worker must get no groups.
        """
        max_error = self.compute_max_error(report)
        # Comparisons with NaN are false, so NaN does not pass.
        if not report.error <= max_error:
            raise CanaryError(
                f"canary of weights version {report.version} ({report.content_hash[:12]}): the "
                f"log-probs of rollout worker {worker} differ from the learner's by "
                f"{report.error:.3g}, allowed {max_error:.3g}; it does not sample from the "
                "published weights"
            )
        self._usual_errors.append(report.error)


@dataclass(frozen=True, slots=True)
class WorkerWeights:
    """The weights that a worker reports to sample from, and the cost of loading them."""

    canary: CanaryReport
    fetch_s: float
    """Time until all tensors were fetched and checked, in seconds."""
    pause_s: float
    """Time without sampling, while the engine loaded the weights and scored the canary prompts."""
    num_bytes_fetched: int
    """Number of fetched bytes, which is smaller than the tensors if differences were fetched."""

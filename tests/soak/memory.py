"""Memory growth of a process: a robust slope, compared with the noise.

    samples, one a second --second half--> Theil-Sen slope, its interval from a block bootstrap
                                      --residuals--> noise

Memory changes in steps and then stays constant for a while, so the bootstrap draws blocks of
successive samples.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MIN_SAMPLES = 900
"""Minimum number of samples for a verdict. A restarted server first fills its records of 1,024
ended sessions."""
BLOCK_S = 180.0
"""Block length in seconds, longer than memory stays constant. With shorter blocks, two steps would
count as a trend."""
NUM_DRAWS = 400
MAX_REST_MIB = 16.0
"""Maximum memory after all sessions have ended, above the median with sessions. A single oversized
observation needs twice as much."""
_MAX_POINTS = 200
_LINE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory of a process at one time."""

    at_s: float
    rss_mib: float
    pss_mib: float
    uss_mib: float
    """Private memory."""
    num_files: int
    num_threads: int


def measure_process(pid: int, at_s: float) -> Sample | None:
    """Measure a process; return None if it has exited."""
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        kib = {
            name: int(value) for name, value in _LINE.findall((folder / "smaps_rollup").read_text())
        }
        if "Rss" in kib:
            return Sample(
                at_s,
                kib["Rss"] / 1024,
                kib["Pss"] / 1024,
                (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024,
                len(list((folder / "fd").iterdir())),
                len(list((folder / "task").iterdir())),
            )
    return None


@dataclass(frozen=True, slots=True)
class Trend:
    """The trend of a series, per hour."""

    per_hour: float
    low: float
    high: float
    """95 % interval."""
    noise: float
    """Robust standard deviation of the residuals."""
    window_s: float
    num_samples: int
    step: float = 0.0
    """Step size of the series; a single step is not a trend."""

    @property
    def growth(self) -> float:
        """Growth within the measured window."""
        return self.per_hour * self.window_s / 3600

    @property
    def is_flat(self) -> bool:
        """True if the interval contains zero, or the growth is within a step or the noise."""
        return self.low <= 0 or self.growth <= max(self.noise, self.step)


def fit_trend(at_s: Floats, values: Floats, *, step: float = 0.0, seed: int = 0) -> Trend:
    """Return the trend of the second half of a series with the given step size."""
    second_half = at_s >= (at_s[0] + at_s[-1]) / 2
    at_s, values = at_s[second_half], values[second_half]
    slope = _compute_theil_sen_slope(at_s, values)
    residuals = values - slope * at_s
    noise = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
    low, high = _bootstrap_interval(at_s, values, np.random.default_rng(seed))
    window_s = float(at_s[-1] - at_s[0])
    return Trend(slope * 3600, low * 3600, high * 3600, noise, window_s, len(values), step)


def compute_rise_above_median(values: Floats) -> float:
    """Return the difference of the last value and the median of the second half."""
    return float(values[-1] - np.median(values[len(values) // 2 :]))


def _compute_theil_sen_slope(at_s: Floats, values: Floats) -> float:
    """Return the median slope of all pairs, or of an even sample of many pairs."""
    step = max(1, -(-len(at_s) // _MAX_POINTS))
    at_s, values = at_s[::step], values[::step]
    first_indices, second_indices = np.triu_indices(len(at_s), 1)
    time_differences_s = at_s[second_indices] - at_s[first_indices]
    is_usable = time_differences_s > 0
    return float(
        np.median(
            (values[second_indices] - values[first_indices])[is_usable]
            / time_differences_s[is_usable]
        )
    )


def _bootstrap_interval(
    at_s: Floats, values: Floats, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the 95 % interval of the slope by a block bootstrap."""
    num_blocks = max(2, round(float(at_s[-1] - at_s[0]) / BLOCK_S))
    blocks = np.array_split(np.arange(len(at_s)), num_blocks)
    slopes = []
    for _ in range(NUM_DRAWS):
        block_indices = rng.integers(len(blocks), size=len(blocks))
        if len(set(block_indices.tolist())) < 2:
            continue
        sample_indices = np.concatenate([blocks[index] for index in block_indices])
        slopes.append(_compute_theil_sen_slope(at_s[sample_indices], values[sample_indices]))
    low, high = np.quantile(slopes, [0.025, 0.975])
    return float(low), float(high)

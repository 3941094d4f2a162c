"""Whether a process grows: a robust slope of its memory, beside the noise around it.

    samples, one a second --second half--> Theil-Sen slope, its interval from a block bootstrap
                                      --residuals--> noise

Memory moves in steps and stays there for a while, so neighbouring samples are drawn together.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MIN_SAMPLES = 900
"""Whoever lives shorter is not judged: a server that was started again still fills what it
remembers of sessions that ended, of which there are 1,024 after that time."""
BLOCK_S = 180.0
"""Longer than memory stays on a step: shorter blocks take two steps for a trend."""
NUM_DRAWS = 400
AT_REST_MIB = 16.0
"""What a process may hold at the end, when its sessions have ended, above what it held while it had
them: one observation that was too large has twice that."""
_MAX_POINTS = 200
_LINE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process holds at one moment."""

    at_s: float
    rss_mib: float
    pss_mib: float
    uss_mib: float
    """What it shares with nobody."""
    num_files: int
    num_threads: int


def sample(pid: int, at_s: float) -> Sample | None:
    """The process now; None where it is gone."""
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
    """How a series goes on, per hour."""

    per_hour: float
    low: float
    high: float
    """95 % interval."""
    noise: float
    """Robust standard deviation around the line."""
    window_s: float
    num_samples: int
    step: float = 0.0
    """What the series moves by at once: a single step is no slope."""

    @property
    def growth(self) -> float:
        """In the window that was looked at."""
        return self.per_hour * self.window_s / 3600

    @property
    def is_flat(self) -> bool:
        """True where the interval holds zero, or the growth is one step, or drowns in the noise."""
        return self.low <= 0 or self.growth <= max(self.noise, self.step)


def trend_of(at_s: Floats, values: Floats, *, step: float = 0.0, seed: int = 0) -> Trend:
    """The trend of the second half of a series that moves by `step` at once."""
    half = at_s >= (at_s[0] + at_s[-1]) / 2
    at_s, values = at_s[half], values[half]
    slope = _theil_sen(at_s, values)
    residuals = values - slope * at_s
    noise = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
    low, high = _interval(at_s, values, np.random.default_rng(seed))
    window_s = float(at_s[-1] - at_s[0])
    return Trend(slope * 3600, low * 3600, high * 3600, noise, window_s, len(values), step)


def above_median(values: Floats) -> float:
    """How far the last value is above the median of the second half."""
    return float(values[-1] - np.median(values[len(values) // 2 :]))


def _theil_sen(at_s: Floats, values: Floats) -> float:
    """The median of the slopes of all pairs, thinned out evenly where there are many."""
    step = max(1, -(-len(at_s) // _MAX_POINTS))
    at_s, values = at_s[::step], values[::step]
    first, second = np.triu_indices(len(at_s), 1)
    apart_s = at_s[second] - at_s[first]
    usable = apart_s > 0
    return float(np.median((values[second] - values[first])[usable] / apart_s[usable]))


def _interval(at_s: Floats, values: Floats, draw: np.random.Generator) -> tuple[float, float]:
    """The 95 % interval of the slope, from blocks drawn with replacement."""
    num_blocks = max(2, round(float(at_s[-1] - at_s[0]) / BLOCK_S))
    blocks = np.array_split(np.arange(len(at_s)), num_blocks)
    slopes = []
    for _ in range(NUM_DRAWS):
        drawn = draw.integers(len(blocks), size=len(blocks))
        if len(set(drawn.tolist())) < 2:
            continue
        chosen = np.concatenate([blocks[one] for one in drawn])
        slopes.append(_theil_sen(at_s[chosen], values[chosen]))
    low, high = np.quantile(slopes, [0.025, 0.975])
    return float(low), float(high)

"""Linear scales, round ticks, and positions of labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from a data range to a range of pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def padded_range(values: Sequence[float], padding: float = 0.06) -> tuple[float, float]:
    """Return the range of the values with padding; never empty."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        margin = abs(low) * 0.5 or 1.0
    else:
        margin = (high - low) * padding
    # The axis starts at 0 or above if no value is negative.
    return (max(low - margin, 0.0) if low >= 0 else low - margin), high + margin


def round_ticks(low: float, high: float, num_ticks: int) -> list[float]:
    """Return about `num_ticks` round values within the range, evenly spaced."""
    step = _round_step((high - low) / max(num_ticks, 1))
    first_index, last_index = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first_index, last_index + 1)]


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions as little as possible so that they are `gap` apart within low .. high."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    new_positions = list(positions)
    floor = low
    for index in order:
        new_positions[index] = max(new_positions[index], floor)
        floor = new_positions[index] + gap
    ceiling = high
    for index in reversed(order):
        new_positions[index] = min(new_positions[index], ceiling)
        ceiling = new_positions[index] - gap
    return new_positions


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    for factor in (1.0, 2.0, 2.5, 5.0, 10.0):
        if step <= factor * power * (1 + 1e-9):
            return factor * power
    return 10.0 * power

"""Line charts with confidence bands, labeled levels and hover text, which `charts.svg` draws.

The report draws its own SVG: the page stays one small file that follows the reader's light or dark
mode and shows values under the pointer, and `ludus report` needs no plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ludus.services.numbers import format_axis_count, format_compact

LABEL_GAP = 15.0
"""Minimum distance of two labels in pixels."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    x: float
    y: float
    interval: tuple[float, float] | None = None
    hover: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line for comparison."""

    name: str
    value: float
    is_goal: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line that marks an event."""

    x: float
    hover: str


@dataclass(frozen=True, slots=True)
class Label:
    """A name and a value in the right margin."""

    y: float
    value: str
    name: str
    kind: str
    """CSS class: goal, policy or empty."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of a chart and its margins, in pixels."""

    width: float
    height: float
    margin_left: float
    margin_right: float
    margin_top: float
    margin_bottom: float
    num_x_ticks: int = 6
    num_y_ticks: int = 5


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from a range of values to a range of pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


@dataclass(frozen=True)
class LineChart:
    """Content of a chart, and its positions in pixels."""

    frame: Frame
    title: str
    points: Sequence[Point]
    raw_points: Sequence[Point] = ()
    """Noisy measurements, drawn faintly behind the line."""
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    format_y: Callable[[float], str] = format_compact
    format_y_tick: Callable[[float], str] = format_compact
    final_label: str = ""
    """Label at the end of the line."""
    x_title: str = ""
    x_high: float = 0.0
    """Minimum end of the x axis."""

    @cached_property
    def x(self) -> Scale:
        """Scale of the x axis, which starts at 0."""
        high = max([self.x_high, *(point.x for point in (*self.points, *self.raw_points))])
        frame = self.frame
        return Scale(0.0, high or 1.0, frame.margin_left, frame.width - frame.margin_right)

    @cached_property
    def y(self) -> Scale:
        """Scale of the y axis."""
        values = [point.y for point in (*self.points, *self.raw_points)]
        values += [level.value for level in self.levels]
        values += [end for point in self.points for end in point.interval or ()]
        frame = self.frame
        return Scale(*padded_range(values), frame.height - frame.margin_bottom, frame.margin_top)

    def x_ticks(self) -> list[tuple[float, str]]:
        """Return the pixels and texts of the ticks of the x axis."""
        ticks = round_ticks(self.x.low, self.x.high, self.frame.num_x_ticks)
        return [(self.x(tick), format_axis_count(tick, self.x.high)) for tick in ticks]

    def y_ticks(self) -> list[tuple[float, str]]:
        """Return the pixels and texts of the ticks of the y axis."""
        ticks = round_ticks(self.y.low, self.y.high, self.frame.num_y_ticks)
        return [(self.y(tick), self.format_y_tick(tick)) for tick in ticks]

    def line(self, points: Sequence[Point]) -> str:
        """Return the SVG coordinates of a line through the points."""
        return self._coordinates([(point.x, point.y) for point in points])

    def band(self) -> str:
        """Return the SVG coordinates of the band of intervals."""
        ends = [(point.x, *point.interval) for point in self.points if point.interval]
        top = [(x, high) for x, _, high in ends]
        bottom = [(x, low) for x, low, _ in reversed(ends)]
        return self._coordinates([*top, *bottom])

    def labels(self) -> list[Label]:
        """Return the labels of the levels and of the line, without overlap."""
        entries = [
            (level.value, level.name, "goal" if level.is_goal else "") for level in self.levels
        ]
        if self.final_label:
            entries.append((self.points[-1].y, self.final_label, "policy"))
        heights = spread(
            [self.y(value) for value, *_ in entries], LABEL_GAP, self.y.end, self.y.start
        )
        return [
            Label(height, self.format_y(value), name, kind)
            for height, (value, name, kind) in zip(heights, entries, strict=True)
        ]

    def _coordinates(self, positions: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):g},{self.y(y):g}" for x, y in positions)


def padded_range(values: Sequence[float], padding: float = 0.06) -> tuple[float, float]:
    """Return the range of the values with padding; never empty."""
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        margin = abs(low) * 0.5 or 1.0
    else:
        margin = (high - low) * padding
    # The axis starts at 0 or above if no value is negative.
    return (max(low - margin, 0.0) if low >= 0 else low - margin), high + margin


def round_ticks(low: float, high: float, num_ticks: int) -> list[float]:
    """Return about `num_ticks` round values within the range, evenly spaced."""
    min_step = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(min_step))
    steps = (factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0))
    step = next((step for step in steps if step >= min_step * (1 - 1e-9)), 10.0 * power)
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

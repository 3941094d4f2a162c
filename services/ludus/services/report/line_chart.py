"""Line charts with confidence bands, labeled levels and hover text, drawn by `charts.svg`.

The report draws its own SVG, so that the page is one small file that follows the reader's light or
dark mode and shows the value under the pointer. No plotting library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ludus.services.numbers import format_axis_count, format_compact

LABEL_GAP = 15.0
"""Minimum distance between two labels, in pixels."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement, optionally with its confidence interval."""

    x: float
    y: float
    interval: tuple[float, float] | None = None
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Measurements that one line connects."""

    points: Sequence[Point]
    raw_points: Sequence[Point] = ()
    """Noisy measurements, drawn faintly behind the line."""
    name: str = ""
    """Name next to the last point of the line."""
    css_class: str = ""
    """Class that chooses the color; '' is the accent color."""


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line that the curve is compared with."""

    name: str
    value: float
    is_goal: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line that marks an event."""

    x: float
    tooltip: str


@dataclass(frozen=True, slots=True)
class Label:
    """A name and a value in the right margin, at the height `y` in pixels."""

    y: float
    value_text: str
    name: str
    css_class: str
    """Classes of the text: goal, or policy and the class of the line."""


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
    """Pixel position of `low`."""
    end: float
    """Pixel position of `high`."""

    def __call__(self, value: float) -> float:
        """Return the pixel position of a value."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


@dataclass(frozen=True)
class LineChart:
    """The content of a chart, and the pixel positions of everything in it."""

    frame: Frame
    title: str
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    format_y: Callable[[float], str] = format_compact
    format_y_tick: Callable[[float], str] = format_compact
    x_title: str = ""
    x_high: float = 0.0
    """Minimum value at the end of the x axis."""

    @cached_property
    def x_scale(self) -> Scale:
        """Scale of the x axis, which starts at 0."""
        max_x = max([self.x_high, *(point.x for point in self._all_points)])
        frame = self.frame
        return Scale(0.0, max_x or 1.0, frame.margin_left, frame.width - frame.margin_right)

    @cached_property
    def y_scale(self) -> Scale:
        """Scale of the y axis."""
        points = self._all_points
        values = [point.y for point in points]
        values += [level.value for level in self.levels]
        values += [bound for point in points for bound in point.interval or ()]
        frame = self.frame
        return Scale(*pad_range(values), frame.height - frame.margin_bottom, frame.margin_top)

    def make_x_ticks(self) -> list[tuple[float, str]]:
        """Return the pixel position and the text of each tick on the x axis."""
        ticks = choose_ticks(self.x_scale.low, self.x_scale.high, self.frame.num_x_ticks)
        return [(self.x_scale(tick), format_axis_count(tick, self.x_scale.high)) for tick in ticks]

    def make_y_ticks(self) -> list[tuple[float, str]]:
        """Return the pixel position and the text of each tick on the y axis."""
        ticks = choose_ticks(self.y_scale.low, self.y_scale.high, self.frame.num_y_ticks)
        return [(self.y_scale(tick), self.format_y_tick(tick)) for tick in ticks]

    def format_line(self, points: Sequence[Point]) -> str:
        """Return the SVG coordinates of a line through the points."""
        return self._format_coordinates([(point.x, point.y) for point in points])

    def format_band(self, points: Sequence[Point]) -> str:
        """Return the SVG coordinates of the band that the points' intervals form."""
        intervals = [(point.x, *point.interval) for point in points if point.interval]
        top_points = [(x, high) for x, _, high in intervals]
        bottom_points = [(x, low) for x, low, _ in reversed(intervals)]
        return self._format_coordinates([*top_points, *bottom_points])

    def place_labels(self) -> list[Label]:
        """Return the labels of the levels and of the lines, without overlap."""
        rows = [(level.value, level.name, "goal" if level.is_goal else "") for level in self.levels]
        rows += [
            (line.points[-1].y, line.name, f"policy {line.css_class}".rstrip())
            for line in self.lines
            if line.name
        ]
        scale = self.y_scale
        heights = spread_positions([scale(y) for y, *_ in rows], LABEL_GAP, scale.end, scale.start)
        return [
            Label(height, self.format_y(y), name, css_class)
            for height, (y, name, css_class) in zip(heights, rows, strict=True)
        ]

    @cached_property
    def _all_points(self) -> list[Point]:
        return [point for line in self.lines for point in (*line.points, *line.raw_points)]

    def _format_coordinates(self, positions: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x_scale(x):g},{self.y_scale(y):g}" for x, y in positions)


def pad_range(values: Sequence[float], padding: float = 0.06) -> tuple[float, float]:
    """Return a range that contains all values, with padding on both sides."""
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        margin = abs(low) * 0.5 or 1.0
    else:
        margin = (high - low) * padding
    # Padding does not make a range of non-negative values negative.
    return (max(low - margin, 0.0) if low >= 0 else low - margin), high + margin


def choose_ticks(low: float, high: float, num_ticks: int) -> list[float]:
    """Return about `num_ticks` round and evenly spaced values in the range."""
    min_step = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(min_step))
    steps = (factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0))
    step = next((step for step in steps if step >= min_step * (1 - 1e-9)), 10.0 * power)
    first_index, last_index = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first_index, last_index + 1)]


def spread_positions(
    positions: Sequence[float], gap: float, low: float, high: float
) -> list[float]:
    """Move positions so that they are at least `gap` apart and within `low` to `high`."""
    indices = sorted(range(len(positions)), key=lambda index: positions[index])
    new_positions = list(positions)
    min_position = low
    for index in indices:
        new_positions[index] = max(new_positions[index], min_position)
        min_position = new_positions[index] + gap
    max_position = high
    for index in reversed(indices):
        new_positions[index] = min(new_positions[index], max_position)
        max_position = new_positions[index] - gap
    return new_positions

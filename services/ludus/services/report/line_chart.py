"""Line charts with confidence bands, labeled levels and hover text.

The report draws its own SVG: the page stays one small file that follows the reader's light or dark
mode and shows values under the pointer, and `ludus report` needs no plotting library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ludus.services.numbers import format_axis_count, format_compact
from ludus.services.report.drawing import Drawing, hover, line, text
from ludus.services.report.markup import Markup, element, join, number
from ludus.services.report.scales import Scale, padded_range, round_ticks, spread

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
class LineChart:
    """Content of a chart; `draw` determines its appearance."""

    label: str
    points: Sequence[Point]
    raw: Sequence[Point] = ()
    """Noisy measurements, drawn faintly behind the line."""
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    format_y: Callable[[float], str] = format_compact
    format_tick: Callable[[float], str] = format_compact
    final_label: str | None = None
    """Label at the end of the line."""
    x_title: str = ""
    x_high: float | None = None
    """End of the x axis. None: the last point."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of a chart and its margins, in pixels."""

    width: float
    height: float
    margin_left: float = 52
    margin_right: float = 16
    margin_top: float = 12
    margin_bottom: float = 28
    num_x_ticks: int = 6
    num_y_ticks: int = 5


def draw(chart: LineChart, frame: Frame) -> Drawing:
    """Draw the chart as SVG."""
    x = Scale(0.0, _x_end(chart), frame.margin_left, frame.width - frame.margin_right)
    y = Scale(*_y_range(chart), frame.height - frame.margin_bottom, frame.margin_top)
    layers = [
        _grid(chart, frame, x, y),
        _levels(chart, x, y),
        _marks(chart, x, y),
        _band(chart.points, x, y),
        _polyline(chart.raw, x, y, "raw"),
        _polyline(chart.points, x, y, "curve"),
        _dots(chart.points, x, y),
        _labels(chart, frame, y),
    ]
    return Drawing(frame.width, frame.height, join(*layers), chart.label)


def _x_end(chart: LineChart) -> float:
    values = [point.x for point in (*chart.points, *chart.raw)]
    return max([*values, chart.x_high or 0.0]) or 1.0


def _y_range(chart: LineChart) -> tuple[float, float]:
    values = [point.y for point in (*chart.points, *chart.raw)]
    values += [level.value for level in chart.levels]
    values += [end for point in chart.points for end in point.interval or ()]
    return padded_range(values)


def _grid(chart: LineChart, frame: Frame, x: Scale, y: Scale) -> Markup:
    parts: list[Markup] = []
    for value in round_ticks(y.low, y.high, frame.num_y_ticks):
        parts.append(line(x.start, y(value), x.end, y(value), "grid"))
        parts.append(text(x.start - 8, y(value) + 4, chart.format_tick(value), anchor="end"))
    for value in round_ticks(x.low, x.high, frame.num_x_ticks):
        parts.append(line(x(value), y.start, x(value), y.start + 4, "axis"))
        parts.append(
            text(x(value), y.start + 18, format_axis_count(value, x.high), anchor="middle")
        )
    parts.append(line(x.start, y.start, x.end, y.start, "axis"))
    if chart.x_title:
        middle = (x.start + x.end) / 2
        parts.append(text(middle, frame.height - 2, chart.x_title, anchor="middle"))
    return join(*parts)


def _levels(chart: LineChart, x: Scale, y: Scale) -> Markup:
    return join(
        *(
            hover(
                f"{level.name}: {chart.format_y(level.value)}",
                line(x.start, y(level.value), x.end, y(level.value), _level_class(level)),
            )
            for level in chart.levels
        )
    )


def _level_class(level: Level) -> str:
    return "level goal" if level.is_goal else "level"


def _marks(chart: LineChart, x: Scale, y: Scale) -> Markup:
    return join(
        *(
            hover(mark.hover, line(x(mark.x), y.start, x(mark.x), y.end, "mark"))
            for mark in chart.marks
        )
    )


def _band(points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    ends = [(x(point.x), *point.interval) for point in points if point.interval]
    if len(ends) < 2:
        return Markup("")
    top = [(x_pixel, y(high)) for x_pixel, _, high in ends]
    bottom = [(x_pixel, y(low)) for x_pixel, low, _ in reversed(ends)]
    return element("polygon", points=_coordinates([*top, *bottom]), class_="band")


def _polyline(points: Sequence[Point], x: Scale, y: Scale, class_: str) -> Markup:
    if len(points) < 2:
        return Markup("")
    pixels = [(x(point.x), y(point.y)) for point in points]
    return element("polyline", points=_coordinates(pixels), class_=class_)


def _dots(points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    """Draw a dot for each point that has hover text, or for a single point."""
    marked = [point for point in points if point.hover or len(points) == 1]
    return join(
        *(
            hover(
                point.hover,
                element("circle", cx=x(point.x), cy=y(point.y), r=9, class_="target"),
                element("circle", cx=x(point.x), cy=y(point.y), r=2.6, class_="dot"),
            )
            for point in marked
        )
    )


def _labels(chart: LineChart, frame: Frame, y: Scale) -> Markup:
    """Draw the names of the levels and of the line in the right margin."""
    entries = [
        (y(level.value), level.name, chart.format_y(level.value), _label_class(level))
        for level in chart.levels
    ]
    if chart.final_label and chart.points:
        end = chart.points[-1]
        entries.append((y(end.y), chart.final_label, chart.format_y(end.y), "label policy"))
    y_labels = spread(
        [y_label for y_label, *_ in entries],
        LABEL_GAP,
        frame.margin_top,
        frame.height - frame.margin_bottom,
    )
    x_labels = frame.width - frame.margin_right + 10
    return join(
        *(
            text(
                x_labels,
                y_label + 4,
                element("tspan", value, class_="value"),
                f" {name}",
                class_=class_,
            )
            for y_label, (_, name, value, class_) in zip(y_labels, entries, strict=True)
        )
    )


def _label_class(level: Level) -> str:
    return "label goal" if level.is_goal else "label"


def _coordinates(pixels: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{number(x)},{number(y)}" for x, y in pixels)

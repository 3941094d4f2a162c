"""Drawings of dashboard panels as SVG, for the documentation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from grafana.model import Panel

Points = Sequence[tuple[float, float]]

_COLORS = ("#3274d9", "#d9822b", "#2f9e58", "#c4362f", "#7d55c7", "#b8860b", "#17879c", "#8a6d5a")
_NAMED = {"green": "#2f9e58", "yellow": "#d9a400", "red": "#c4362f", "orange": "#d9822b"}
_INK, _FAINT, _GRID = "#24292f", "#6e7781", "#e4e7eb"
_LEGEND_LINES = 3
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 30, 16
_LINE = 15
_SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Series:
    """A named time series over Unix time."""

    name: str
    points: Points
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on the page, in pixels."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Span:
    """The time range of the page."""

    start: float
    end: float


def draw_page(title: str, size: Box, parts: Sequence[str]) -> str:
    """Return the complete SVG."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size.width:g} {size.height:g}"'
            ' font-family="system-ui, sans-serif" font-size="12">',
            f'<rect width="100%" height="100%" fill="#f4f5f7"/><title>{escape(title)}</title>',
            *parts,
            "</svg>\n",
        ]
    )


def draw_heading(text: str, box: Box) -> str:
    """Draw the title of a row."""
    return _text(box.x + 8, box.y + 20, text, size=15, weight="600")


def draw_panel(shown: Panel, title: str, series: Sequence[Series], box: Box, span: Span) -> str:
    """Draw a panel with its data."""
    frame = (
        f'<rect x="{box.x + 3:g}" y="{box.y + 3:g}" width="{box.width - 6:g}"'
        f' height="{box.height - 6:g}" rx="3" fill="#fff" stroke="{_GRID}"/>'
    )
    parts = [frame, _text(box.x + 12, box.y + 20, title, weight="600")]
    draw = {"stat": _stat, "table": _table, "state-timeline": _states, "heatmap": _heat}
    if not any(curve.points for curve in series):
        middle = box.x + box.width / 2
        parts.append(_text(middle, box.y + box.height / 2, "no data", _FAINT, anchor="middle"))
    else:
        parts += draw.get(shown.kind, _lines)(shown, series, box, span)
    return "\n".join(parts)


def format_value(value: float, unit: str, decimals: int | None = None) -> str:
    """Format a value with its unit."""
    match unit:
        case "percentunit":
            return f"{100 * value:.3g}%"
        case "percent":
            return f"{value:.3g}%"
        case "s" if abs(value) >= 2 * _SECONDS_PER_MINUTE:
            return f"{value / _SECONDS_PER_MINUTE:.3g} min"
        case "s" if 0 < abs(value) < 1:
            return f"{1000 * value:.3g} ms"
        case "s":
            return f"{value:.3g} s"
        case "bytes":
            return _format_scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
        case "sci":
            return f"{value:.1e}"
    number = (
        f"{value:.{decimals}f}"
        if decimals is not None
        else _format_scaled(value, 1000, ("", "k", "M"))
    )
    return f"{number} {unit.removeprefix('suffix: ')}" if unit.startswith("suffix") else number


def _format_scaled(value: float, base: int, names: Sequence[str]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value, power = value / base, power + 1
    return f"{value:.3g} {names[power]}".rstrip()


def _lines(shown: Panel, series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    labelled = [(n, curve) for n, curve in enumerate(series) if not _is_limit(curve.name)]
    legend = min(len(labelled), _LEGEND_LINES)
    plot = _plot(box, legend * _LINE)
    shown_series = _stack(series) if shown.stacked else series
    low, high = _bounds(shown, shown_series)
    yield from _axes(shown, plot, (low, high), span)
    for number, curve in enumerate(shown_series):
        color, dashed = _color(shown, curve.name, number), _is_limit(curve.name)
        points = [f"{_x(plot, span, t):.0f},{_y(plot, low, high, v):.1f}" for t, v in curve.points]
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        yield (
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}"'
            f' stroke-width="1.4"{dash}/>'
        )
    for line, (number, curve) in enumerate(labelled[:legend]):
        y = plot.y + plot.height + _BOTTOM + _LINE * (line + 1) - 3
        color = _color(shown, curve.name, number)
        yield f'<rect x="{box.x + 14:g}" y="{y - 7:g}" width="12" height="4" fill="{color}"/>'
        num_hidden = len(labelled) - legend
        suffix = f"   and {num_hidden} more" if num_hidden and line == legend - 1 else ""
        yield _text(box.x + 32, y, curve.name + suffix, _FAINT, size=11)
        last = format_value(curve.points[-1][1], shown.unit, shown.decimals) if curve.points else ""
        yield _text(box.x + box.width - 14, y, last, _FAINT, size=11, anchor="end")


def _stat(shown: Panel, series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    step = box.width / len(series)
    for number, curve in enumerate(series):
        value = curve.points[-1][1]
        mapped = shown.mappings.get(f"{value:g}", {})
        text = str(mapped.get("text") or format_value(value, shown.unit, shown.decimals))
        passed = [color for limit, color in shown.thresholds if value >= limit]
        color = _NAMED.get(passed[-1] if passed else "green", _COLORS[0])
        middle = box.x + step * (number + 0.5)
        size = min(30.0, 1.6 * step / max(len(text), 1))
        y = box.y + box.height / 2 + 14
        yield _text(middle, y, text, color, size=size, weight="600", anchor="middle")
        if len(series) > 1 or shown.queries[0].legend != shown.title:
            yield _text(middle, y + 20, curve.name, _FAINT, size=11, anchor="middle")


def _table(shown: Panel, series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    """Draw one row per combination of labels and one column per query."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    labels = [name for name in shown.columns if not name.startswith("Value")]
    for curve in series:
        key = tuple(curve.labels.get(label, "") for label in labels)
        cells = rows.setdefault(key, dict(zip(labels, key, strict=True)))
        cells[f"Value #{curve.name}"] = f"{curve.points[-1][1]:.4g}"
    step = (box.width - 24) / len(shown.columns)
    for index, (name, title) in enumerate(shown.columns.items()):
        x = box.x + 12 + index * step
        yield _text(x, box.y + 44, title, _FAINT, size=11)
        for number, cells in enumerate(rows.values()):
            yield _text(x, box.y + 64 + 18 * number, cells.get(name, ""), size=11)


def _states(shown: Panel, series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    plot = _plot(box, 0, left_margin=2 * _LEFT)
    height = plot.height / len(series)
    for number, curve in enumerate(series):
        y = plot.y + number * height
        yield _text(plot.x - 6, y + height / 2 + 4, curve.name, _FAINT, size=10, anchor="end")
        steps = list(zip(curve.points, [*curve.points[1:], (span.end, 0.0)], strict=True))
        for (start, value), (end, _) in steps:
            if value:
                x, to = _x(plot, span, start), _x(plot, span, end)
                yield (
                    f'<rect x="{x:.1f}" y="{y + 2:.1f}" width="{to - x:.1f}"'
                    f' height="{height - 4:.1f}" fill="{_NAMED["green"]}"/>'
                )
    yield from _minutes(plot, span)


def _heat(shown: Panel, series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    plot = _plot(box, 0)
    rows = sorted(series, key=lambda curve: float(curve.labels.get("le", "inf")))
    lower_counts: dict[float, float] = {}
    cells: list[tuple[int, float, float]] = []
    for number, curve in enumerate(rows):
        cells += [(number, t, max(v - lower_counts.get(t, 0.0), 0.0)) for t, v in curve.points]
        lower_counts = dict(curve.points)
    max_value = max(value for _, _, value in cells) or 1.0
    height, times = plot.height / len(rows), sorted({t for _, t, _ in cells})
    width = plot.width / max(len(times), 1)
    for number, t, value in cells:
        if value:
            yield (
                f'<rect x="{_x(plot, span, t):.1f}" width="{width:.1f}" height="{height:.1f}"'
                f' y="{plot.y + plot.height - (number + 1) * height:.1f}" fill="#d9822b"'
                f' opacity="{0.15 + 0.85 * math.sqrt(value / max_value):.2f}"/>'
            )
    for number, curve in enumerate(rows):
        y = plot.y + plot.height - number * height - height / 2 + 4
        yield _text(plot.x - 6, y, curve.labels.get("le", ""), _FAINT, size=9, anchor="end")
    yield from _minutes(plot, span)


def _plot(box: Box, legend_height: float, left_margin: float = _LEFT) -> Box:
    return Box(
        box.x + left_margin,
        box.y + _TOP,
        box.width - left_margin - _RIGHT - 8,
        box.height - _TOP - _BOTTOM - legend_height - 10,
    )


def _axes(shown: Panel, plot: Box, bounds: tuple[float, float], span: Span) -> Iterator[str]:
    low, high = bounds
    for number in range(5):
        value = low + (high - low) * number / 4
        y = _y(plot, low, high, value)
        yield (
            f'<line x1="{plot.x:g}" x2="{plot.x + plot.width:g}" y1="{y:.1f}" y2="{y:.1f}"'
            f' stroke="{_GRID}"/>'
        )
        unit = shown.unit if shown.unit in ("percentunit", "percent", "s", "bytes", "sci") else ""
        text = format_value(value if abs(value) > (high - low) / 1000 else 0.0, unit)
        yield _text(plot.x - 6, y + 4, text, _FAINT, size=10, anchor="end")
    yield from _minutes(plot, span)


def _minutes(plot: Box, span: Span) -> Iterator[str]:
    minutes = (span.end - span.start) / _SECONDS_PER_MINUTE
    every = max(1, round(minutes / 6))
    for minute in range(0, int(minutes) + 1, every):
        x = _x(plot, span, span.start + _SECONDS_PER_MINUTE * minute)
        anchor = "end" if minute + every > minutes else "middle"
        yield _text(x, plot.y + plot.height + 13, f"{minute} min", _FAINT, size=10, anchor=anchor)


def _bounds(shown: Panel, series: Sequence[Series]) -> tuple[float, float]:
    values = [value for curve in series for _, value in curve.points]
    low = min(values) if shown.min is None else shown.min
    high = max(values) if shown.max is None else shown.max
    if high - low < 1e-12:
        return low - (0.0 if shown.min is not None else 0.5), high + max(abs(high), 1.0) * 0.5
    return low, high


def _stack(series: Sequence[Series]) -> list[Series]:
    total: dict[float, float] = {}
    stacked = []
    for curve in series:
        points = []
        for t, value in curve.points:
            total[t] = total.get(t, 0.0) + value
            points.append((t, total[t]))
        stacked.append(Series(curve.name, points, curve.labels))
    return stacked


def _color(shown: Panel, name: str, number: int) -> str:
    if _is_limit(name):
        return "#9aa4af"
    for override in shown.overrides:
        fixed = override.properties.get("color", {}).get("fixedColor")
        if fixed and name.startswith(override.pattern.strip("^ ")):
            return _NAMED.get(fixed, _COLORS[0])
    return _COLORS[number % len(_COLORS)]


def _is_limit(name: str) -> bool:
    return name.endswith((" low", " high"))


def _x(plot: Box, span: Span, t: float) -> float:
    return plot.x + plot.width * (t - span.start) / (span.end - span.start)


def _y(plot: Box, low: float, high: float, value: float) -> float:
    share = min(max((value - low) / (high - low), 0.0), 1.0)
    return plot.y + plot.height * (1 - share)


def _text(
    x: float,
    y: float,
    text: str,
    color: str = _INK,
    *,
    size: float = 12,
    weight: str = "",
    anchor: str = "",
) -> str:
    suffix = f' font-weight="{weight}"' if weight else ""
    suffix += f' text-anchor="{anchor}"' if anchor else ""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}" font-size="{size:.3g}"{suffix}>'
        f"{escape(text)}</text>"
    )

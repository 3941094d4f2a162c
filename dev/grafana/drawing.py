"""Drawings of dashboard panels as SVG, for the documentation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from grafana.model import Panel

Points = Sequence[tuple[float, float]]

_COLORS = ("#3274d9", "#d9822b", "#2f9e58", "#c4362f", "#7d55c7", "#b8860b", "#17879c", "#8a6d5a")
_COLORS_BY_NAME = {"green": "#2f9e58", "yellow": "#d9a400", "red": "#c4362f", "orange": "#d9822b"}
_BLACK, _GRAY, _LIGHT_GRAY = "#24292f", "#6e7781", "#e4e7eb"
_LEGEND_LINES = 3
_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 62, 10, 30, 16
_LINE_HEIGHT = 15
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
    return _draw_text(box.x + 8, box.y + 20, text, size=15, weight="600")


def draw_panel(panel: Panel, title: str, series: Sequence[Series], box: Box, span: Span) -> str:
    """Draw a panel with its data."""
    frame = (
        f'<rect x="{box.x + 3:g}" y="{box.y + 3:g}" width="{box.width - 6:g}"'
        f' height="{box.height - 6:g}" rx="3" fill="#fff" stroke="{_LIGHT_GRAY}"/>'
    )
    parts = [frame, _draw_text(box.x + 12, box.y + 20, title, weight="600")]
    drawers = {
        "stat": _draw_stat,
        "table": _draw_table,
        "state-timeline": _draw_states,
        "heatmap": _draw_heat,
    }
    if not any(curve.points for curve in series):
        x = box.x + box.width / 2
        parts.append(_draw_text(x, box.y + box.height / 2, "no data", _GRAY, anchor="middle"))
    else:
        parts += drawers.get(panel.kind, _draw_lines)(panel, series, box, span)
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
    text = (
        f"{value:.{decimals}f}"
        if decimals is not None
        else _format_scaled(value, 1000, ("", "k", "M"))
    )
    return f"{text} {unit.removeprefix('suffix: ')}" if unit.startswith("suffix") else text


def _format_scaled(value: float, base: int, names: Sequence[str]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value, power = value / base, power + 1
    return f"{value:.3g} {names[power]}".rstrip()


def _draw_lines(panel: Panel, series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    entries = [(index, curve) for index, curve in enumerate(series) if not _is_limit(curve.name)]
    num_entries = min(len(entries), _LEGEND_LINES)
    plot = _find_plot(box, num_entries * _LINE_HEIGHT)
    shown_series = _stack(series) if panel.stacked else series
    bottom, top = _find_bounds(panel, shown_series)
    yield from _draw_axes(panel, plot, (bottom, top), span)
    for index, curve in enumerate(shown_series):
        color, is_limit = _choose_color(panel, curve.name, index), _is_limit(curve.name)
        points = [
            f"{_find_x(plot, span, t):.0f},{_find_y(plot, bottom, top, value):.1f}"
            for t, value in curve.points
        ]
        dash_attribute = ' stroke-dasharray="3 3"' if is_limit else ""
        yield (
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}"'
            f' stroke-width="1.4"{dash_attribute}/>'
        )
    for line, (index, curve) in enumerate(entries[:num_entries]):
        y = plot.y + plot.height + _BOTTOM_MARGIN + _LINE_HEIGHT * (line + 1) - 3
        color = _choose_color(panel, curve.name, index)
        yield f'<rect x="{box.x + 14:g}" y="{y - 7:g}" width="12" height="4" fill="{color}"/>'
        num_hidden = len(entries) - num_entries
        suffix = f"   and {num_hidden} more" if num_hidden and line == num_entries - 1 else ""
        yield _draw_text(box.x + 32, y, curve.name + suffix, _GRAY, size=11)
        text = format_value(curve.points[-1][1], panel.unit, panel.decimals) if curve.points else ""
        yield _draw_text(box.x + box.width - 14, y, text, _GRAY, size=11, anchor="end")


def _draw_stat(panel: Panel, series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    step = box.width / len(series)
    for index, curve in enumerate(series):
        value = curve.points[-1][1]
        mapping = panel.mappings.get(f"{value:g}", {})
        text = str(mapping.get("text") or format_value(value, panel.unit, panel.decimals))
        passed_colors = [color for limit, color in panel.thresholds if value >= limit]
        color = _COLORS_BY_NAME.get(passed_colors[-1] if passed_colors else "green", _COLORS[0])
        x = box.x + step * (index + 0.5)
        size = min(30.0, 1.6 * step / max(len(text), 1))
        y = box.y + box.height / 2 + 14
        yield _draw_text(x, y, text, color, size=size, weight="600", anchor="middle")
        if len(series) > 1 or panel.queries[0].legend != panel.title:
            yield _draw_text(x, y + 20, curve.name, _GRAY, size=11, anchor="middle")


def _draw_table(panel: Panel, series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    """Draw one row per combination of labels and one column per query."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    labels = [name for name in panel.columns if not name.startswith("Value")]
    for curve in series:
        key = tuple(curve.labels.get(label, "") for label in labels)
        cells = rows.setdefault(key, dict(zip(labels, key, strict=True)))
        cells[f"Value #{curve.name}"] = f"{curve.points[-1][1]:.4g}"
    step = (box.width - 24) / len(panel.columns)
    for index, (name, title) in enumerate(panel.columns.items()):
        x = box.x + 12 + index * step
        yield _draw_text(x, box.y + 44, title, _GRAY, size=11)
        for row_index, cells in enumerate(rows.values()):
            yield _draw_text(x, box.y + 64 + 18 * row_index, cells.get(name, ""), size=11)


def _draw_states(panel: Panel, series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    plot = _find_plot(box, 0, left_margin=2 * _LEFT_MARGIN)
    height = plot.height / len(series)
    for index, curve in enumerate(series):
        y = plot.y + index * height
        yield _draw_text(plot.x - 6, y + height / 2 + 4, curve.name, _GRAY, size=10, anchor="end")
        segments = list(zip(curve.points, [*curve.points[1:], (span.end, 0.0)], strict=True))
        for (start, value), (end, _) in segments:
            if value:
                x, end_x = _find_x(plot, span, start), _find_x(plot, span, end)
                yield (
                    f'<rect x="{x:.1f}" y="{y + 2:.1f}" width="{end_x - x:.1f}"'
                    f' height="{height - 4:.1f}" fill="{_COLORS_BY_NAME["green"]}"/>'
                )
    yield from _draw_minutes(plot, span)


def _draw_heat(panel: Panel, series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    plot = _find_plot(box, 0)
    rows = sorted(series, key=lambda curve: float(curve.labels.get("le", "inf")))
    lower_counts: dict[float, float] = {}
    cells: list[tuple[int, float, float]] = []
    for index, curve in enumerate(rows):
        cells += [
            (index, t, max(value - lower_counts.get(t, 0.0), 0.0)) for t, value in curve.points
        ]
        lower_counts = dict(curve.points)
    max_value = max(value for _, _, value in cells) or 1.0
    height, times = plot.height / len(rows), sorted({t for _, t, _ in cells})
    width = plot.width / max(len(times), 1)
    for index, t, value in cells:
        if value:
            yield (
                f'<rect x="{_find_x(plot, span, t):.1f}" width="{width:.1f}" height="{height:.1f}"'
                f' y="{plot.y + plot.height - (index + 1) * height:.1f}" fill="#d9822b"'
                f' opacity="{0.15 + 0.85 * math.sqrt(value / max_value):.2f}"/>'
            )
    for index, curve in enumerate(rows):
        y = plot.y + plot.height - index * height - height / 2 + 4
        yield _draw_text(plot.x - 6, y, curve.labels.get("le", ""), _GRAY, size=9, anchor="end")
    yield from _draw_minutes(plot, span)


def _find_plot(box: Box, legend_height: float, left_margin: float = _LEFT_MARGIN) -> Box:
    return Box(
        box.x + left_margin,
        box.y + _TOP_MARGIN,
        box.width - left_margin - _RIGHT_MARGIN - 8,
        box.height - _TOP_MARGIN - _BOTTOM_MARGIN - legend_height - 10,
    )


def _draw_axes(panel: Panel, plot: Box, bounds: tuple[float, float], span: Span) -> Iterator[str]:
    bottom, top = bounds
    for index in range(5):
        value = bottom + (top - bottom) * index / 4
        y = _find_y(plot, bottom, top, value)
        yield (
            f'<line x1="{plot.x:g}" x2="{plot.x + plot.width:g}" y1="{y:.1f}" y2="{y:.1f}"'
            f' stroke="{_LIGHT_GRAY}"/>'
        )
        unit = panel.unit if panel.unit in ("percentunit", "percent", "s", "bytes", "sci") else ""
        text = format_value(value if abs(value) > (top - bottom) / 1000 else 0.0, unit)
        yield _draw_text(plot.x - 6, y + 4, text, _GRAY, size=10, anchor="end")
    yield from _draw_minutes(plot, span)


def _draw_minutes(plot: Box, span: Span) -> Iterator[str]:
    minutes = (span.end - span.start) / _SECONDS_PER_MINUTE
    interval = max(1, round(minutes / 6))
    for minute in range(0, int(minutes) + 1, interval):
        x = _find_x(plot, span, span.start + _SECONDS_PER_MINUTE * minute)
        anchor = "end" if minute + interval > minutes else "middle"
        yield _draw_text(
            x, plot.y + plot.height + 13, f"{minute} min", _GRAY, size=10, anchor=anchor
        )


def _find_bounds(panel: Panel, series: Sequence[Series]) -> tuple[float, float]:
    values = [value for curve in series for _, value in curve.points]
    bottom = min(values) if panel.min is None else panel.min
    top = max(values) if panel.max is None else panel.max
    if top - bottom < 1e-12:
        return bottom - (0.0 if panel.min is not None else 0.5), top + max(abs(top), 1.0) * 0.5
    return bottom, top


def _stack(series: Sequence[Series]) -> list[Series]:
    totals: dict[float, float] = {}
    stacked_series = []
    for curve in series:
        points = []
        for t, value in curve.points:
            totals[t] = totals.get(t, 0.0) + value
            points.append((t, totals[t]))
        stacked_series.append(Series(curve.name, points, curve.labels))
    return stacked_series


def _choose_color(panel: Panel, name: str, index: int) -> str:
    if _is_limit(name):
        return "#9aa4af"
    for override in panel.overrides:
        fixed_color = override.properties.get("color", {}).get("fixedColor")
        if fixed_color and name.startswith(override.pattern.strip("^ ")):
            return _COLORS_BY_NAME.get(fixed_color, _COLORS[0])
    return _COLORS[index % len(_COLORS)]


def _is_limit(name: str) -> bool:
    return name.endswith((" low", " high"))


def _find_x(plot: Box, span: Span, t: float) -> float:
    return plot.x + plot.width * (t - span.start) / (span.end - span.start)


def _find_y(plot: Box, bottom: float, top: float, value: float) -> float:
    share = min(max((value - bottom) / (top - bottom), 0.0), 1.0)
    return plot.y + plot.height * (1 - share)


def _draw_text(
    x: float,
    y: float,
    text: str,
    color: str = _BLACK,
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

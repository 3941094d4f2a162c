"""Draw the dashboards with data of a Prometheus: docs/images/ludus-*.svg.

    dashboards.py --expressions--> Prometheus --series--> grafana/drawing.py --> SVG

No Grafana is needed. Layout, expressions, units and colors are those of the dashboards, but the
pictures look different from Grafana's. Times are Unix times in seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dashboards import DASHBOARDS
from grafana import drawing
from grafana.drawing import Box, Series, Span
from grafana.model import GRID_COLUMNS, Dashboard, Panel, Query

TARGET = Path(__file__).parent.parent / "docs" / "images"
COLUMN_WIDTH, ROW_HEIGHT, HEADING_HEIGHT = 60, 26, 30
NUM_POINTS = 100


class SeriesSource(Protocol):
    """A source of time series, with the time range and the selected variables of the page."""

    @property
    def span(self) -> Span: ...
    @property
    def selection(self) -> Mapping[str, str]: ...
    def series(self, query: Query, letter: str, is_table: bool) -> list[Series]:
        """Return the series of a query, named by its legend, or by its letter in a table."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A Prometheus server."""

    address: str
    span: Span
    selection: Mapping[str, str]

    def series(self, query: Query, letter: str, is_table: bool) -> list[Series]:
        """Return the series of a query, named by its legend, or by its letter in a table."""
        step = (self.span.end - self.span.start) / NUM_POINTS
        expression = re.sub(r"\$(\w+)", lambda match: self.selection[match[1]], query.expr)
        parameters = {
            "query": expression,
            "start": self.span.start,
            "end": self.span.end,
            "step": f"{step:.3f}",
        }
        url = f"{self.address}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url) as response:
            results = json.load(response)["data"]["result"]
        return [_parse_series(result, letter if is_table else query.legend) for result in results]


def draw(dashboard: Dashboard, source: SeriesSource) -> str:
    """Return the page as SVG."""
    parts, y = [], 0.0
    for row in dashboard.rows:
        parts.append(drawing.draw_heading(row.title, Box(0, y, 0, 0)))
        x, y, height = 0, y + HEADING_HEIGHT, 0
        for panel in row.panels:
            if x + panel.width > GRID_COLUMNS:
                x, y, height = 0, y + height * ROW_HEIGHT, 0
            box = Box(x * COLUMN_WIDTH, y, panel.width * COLUMN_WIDTH, panel.height * ROW_HEIGHT)
            parts.append(_draw_panel(panel, source, box))
            x, height = x + panel.width, max(height, panel.height)
        y += height * ROW_HEIGHT
    return drawing.draw_page(dashboard.title, Box(0, 0, GRID_COLUMNS * COLUMN_WIDTH, y + 4), parts)


def _draw_panel(panel: Panel, source: SeriesSource, box: Box) -> str:
    title = re.sub(r"\$(\w+)", lambda match: source.selection[match[1]], panel.title)
    series = [
        curve
        for index, query in enumerate(panel.queries)
        for curve in source.series(query, chr(ord("A") + index), panel.kind == "table")
    ]
    return drawing.draw_panel(panel, title, series, box, source.span)


def _parse_series(result: Mapping[str, Any], legend: str) -> Series:
    labels = result["metric"]
    name = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), legend)
    values = [(float(time), float(value)) for time, value in result["values"]]
    return Series(name, [(time, value) for time, value in values if math.isfinite(value)], labels)


def main() -> None:
    """Draw every dashboard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus", help="address, for example http://127.0.0.1:9090")
    parser.add_argument("--start", type=float, required=True)
    parser.add_argument("--end", type=float, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--environment", required=True)
    parser.add_argument("--window", default="1m")
    parser.add_argument("--rate-interval", default="1m", help="four scrapes or more")
    parser.add_argument("--to", type=Path, default=TARGET)
    arguments = parser.parse_args()
    selection = {
        "namespace": ".*",
        "run": arguments.run,
        "environment": arguments.environment,
        "window": arguments.window,
        "__rate_interval": arguments.rate_interval,
    }
    source = Prometheus(
        arguments.prometheus.rstrip("/"), Span(arguments.start, arguments.end), selection
    )
    for dashboard in DASHBOARDS:
        (arguments.to / f"{dashboard.uid}.svg").write_text(
            draw(dashboard, source), encoding="utf-8"
        )


if __name__ == "__main__":
    main()

"""Tests of SVG pictures of dashboards, drawn from fake Prometheus data."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from dashboard_pictures import TARGET, draw
from dashboards import DASHBOARDS
from grafana.drawing import Series, Span, format_value
from grafana.model import Dashboard, Query

SPAN = Span(0.0, 420.0)
SELECTION = {"environment": "blackjack"}


class FakeSource:
    """A data source that returns two series for every query."""

    span, selection = SPAN, SELECTION

    def series(self, query: Query, letter: str, is_table: bool) -> list[Series]:
        points = [(60.0 * minute, minute / 7) for minute in range(8)]
        labels = {"run": "a & b", "le": "0.5"}
        return [Series(letter if is_table else name, points, labels) for name in ("x", "x low")]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_picture_contains_every_panel(dashboard: Dashboard) -> None:
    root = ElementTree.fromstring(draw(dashboard, FakeSource()))
    texts = {element.text for element in root.iter() if element.text}
    for row in dashboard.rows:
        titles = {panel.title.replace("$environment", "blackjack") for panel in row.panels}
        assert {row.title, *titles} <= texts
    assert "no data" not in texts


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.435, "percentunit", "43.5%"),
        (0.025, "s", "25 ms"),
        (600, "s", "10 min"),
        (482_000, "bytes", "471 KiB"),
        (3070, "suffix: sessions", "3.07 k sessions"),
        (2e-3, "sci", "2.0e-03"),
    ],
)
def test_values_are_formatted_with_the_unit(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_docs_page_has_a_picture_of_every_dashboard() -> None:
    page = (Path(TARGET).parent / "dashboards.md").read_text(encoding="utf-8")
    for dashboard in DASHBOARDS:
        assert f"(images/{dashboard.uid}.svg)" in page
        assert (TARGET / f"{dashboard.uid}.svg").is_file()

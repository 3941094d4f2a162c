"""Model of Grafana dashboards and its conversion to JSON.

    Dashboard --+-- variables
                +-- Row --+-- Panel --+-- Query
                          +-- ...     +-- Query

The output is Grafana's classic JSON, which files and ConfigMaps can provision in every version.
Panels are numbered and placed in order into a grid of 24 columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "heatmap", "state-timeline", "table"]

SCHEMA_VERSION = 39
"""Schema version of Grafana 10.2 and newer."""
GRID_COLUMNS = 24
TAG = "ludus"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_ROW_HEIGHT = 1


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str
    empty_unless: str | None = None
    """Condition for data; None if every run has data."""


@dataclass(frozen=True, slots=True)
class Override:
    """Style of the series whose names match a pattern."""

    pattern: str
    properties: Mapping[str, Any]

    def to_json(self) -> Json:
        """Convert to Grafana's JSON."""
        return {
            "matcher": {"id": "byRegexp", "options": f"/{self.pattern}/"},
            "properties": [{"id": name, "value": value} for name, value in self.properties.items()],
        }


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel with one chart."""

    title: str
    description: str
    queries: Sequence[Query]
    unit: str
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    min: float | None = None
    max: float | None = None
    decimals: int | None = None
    stacked: bool = False
    thresholds: Sequence[tuple[float, str]] = ()
    """Lower bounds and colors; values below the first bound are green."""
    mappings: Mapping[str, Json] = field(default_factory=dict)
    """Text and color by value."""
    overrides: Sequence[Override] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    """Headings of a table's columns by field name; other fields are hidden."""
    repeat: str | None = None
    """Variable whose values each get a copy of the panel."""

    def to_json(self, panel_id: int, x: int, y: int) -> Json:
        """Convert to Grafana's JSON."""
        panel: Json = {
            "id": panel_id,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": _DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "targets": [self._make_target(*entry) for entry in enumerate(self.queries)],
            "fieldConfig": {
                "defaults": self._make_defaults(),
                "overrides": [override.to_json() for override in self.overrides],
            },
            "options": self._make_options(),
        }
        if self.repeat is not None:
            panel |= {"repeat": self.repeat, "repeatDirection": "h", "maxPerRow": 3}
        if self.kind == "table":
            panel["transformations"] = self._make_transformations()
        return panel

    def _make_target(self, index: int, query: Query) -> Json:
        target: Json = {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "legendFormat": query.legend,
            "range": self.kind != "table",
            "instant": self.kind == "table",
        }
        if self.kind in ("table", "heatmap"):
            target["format"] = self.kind
        return target

    def _make_defaults(self) -> Json:
        steps = [{"color": "green", "value": None}]
        steps += [{"color": color, "value": value} for value, color in self.thresholds]
        uses_palette = self.kind == "timeseries" or not self.thresholds
        defaults: Json = {
            "unit": self.unit,
            "color": {"mode": "palette-classic" if uses_palette else "thresholds"},
            "custom": self._make_custom(),
            "mappings": [{"type": "value", "options": self.mappings}] if self.mappings else [],
            "thresholds": {"mode": "absolute", "steps": steps},
        }
        bounds = {"min": self.min, "max": self.max, "decimals": self.decimals}
        return defaults | {name: value for name, value in bounds.items() if value is not None}

    def _make_custom(self) -> Json:
        if self.kind == "timeseries":
            return {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 30 if self.stacked else 5,
                "showPoints": "auto",
                # Draw lines across gaps: scrapes can be missing, and evaluations are far apart.
                "spanNulls": True,
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            }
        if self.kind == "state-timeline":
            return {"fillOpacity": 80, "lineWidth": 0}
        return {}

    def _make_options(self) -> Json:
        legend = {
            "showLegend": True,
            "displayMode": "table",
            "placement": "bottom",
            "calcs": ["lastNotNull", "mean"],
        }
        match self.kind:
            case "timeseries":
                return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
            case "stat":
                return {
                    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                    "colorMode": "value",
                    "graphMode": "area",
                    "textMode": "auto",
                    "orientation": "auto",
                    "justifyMode": "auto",
                }
            case "heatmap":
                return {
                    "calculate": False,
                    "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                    "yAxis": {"unit": self.unit, "axisPlacement": "left"},
                    "rowsFrame": {"layout": "auto"},
                    "cellGap": 1,
                    "legend": {"show": True},
                    "tooltip": {"mode": "single", "yHistogram": False},
                }
            case "state-timeline":
                return {
                    "mergeValues": True,
                    "showValue": "never",
                    "alignValue": "left",
                    "rowHeight": 0.9,
                    "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom"},
                    "tooltip": {"mode": "single", "sort": "none"},
                }
            case "table":
                return {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}}

    def _make_transformations(self) -> list[Json]:
        positions = {name: position for position, name in enumerate(self.columns)}
        return [
            {"id": "merge", "options": {}},
            {"id": "filterFieldsByName", "options": {"include": {"names": list(self.columns)}}},
            {
                "id": "organize",
                "options": {"indexByName": positions, "renameByName": dict(self.columns)},
            },
        ]


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A selection at the top of a dashboard."""

    name: str
    label: str
    description: str
    query: str
    """Grafana's label_values(...) or query_result(...), the kind of a data source, or values
    separated by commas."""
    type: Literal["query", "datasource", "custom"] = "query"
    multiple: bool = True
    """True if several values, or all of them, may be selected."""
    default: str | None = None
    regex: str = ""
    """Pattern of the value in each line of the result; empty selects the whole line."""

    def to_json(self) -> Json:
        """Convert to Grafana's JSON."""
        variable: Json = {
            "name": self.name,
            "label": self.label,
            "description": self.description,
            "type": self.type,
            "query": self.query,
            "hide": 0,
            "multi": self.multiple,
            "includeAll": self.multiple,
        }
        if self.type == "query":
            variable |= {
                "datasource": _DATASOURCE,
                "definition": self.query,
                "regex": self.regex,
                "query": {"query": self.query, "refId": self.name},
                # Refresh with the time range, so that a run of last week is listed.
                "refresh": 2,
                "sort": 1,
            }
        if self.multiple:
            # A pattern instead of the known values, so that a missing label matches, too.
            variable |= {"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
        elif self.default is not None:
            variable["current"] = {"text": self.default, "value": self.default}
        if self.type == "custom":
            variable["options"] = [
                {"text": value, "value": value, "selected": value == self.default}
                for value in self.query.split(",")
            ]
        return variable


@dataclass(frozen=True, slots=True)
class Annotation:
    """Times marked in every panel."""

    name: str
    expr: str
    text: str
    color: str
    empty_unless: str

    def to_json(self) -> Json:
        """Convert to Grafana's JSON."""
        return {
            "name": self.name,
            "datasource": _DATASOURCE,
            "enable": True,
            "hide": False,
            "iconColor": self.color,
            "expr": self.expr,
            "step": "60s",
            "titleFormat": self.name,
            "textFormat": self.text,
        }


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard, which is one file of the chart."""

    uid: str
    """Unique id, also used as file name."""
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]
    annotations: Sequence[Annotation] = ()

    def to_json(self) -> Json:
        """Convert to Grafana's JSON."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "timezone": "browser",
            "links": [_LINKS],
            "templating": {"list": [variable.to_json() for variable in self.variables]},
            "annotations": {"list": [annotation.to_json() for annotation in self.annotations]},
            "panels": list(self._make_panels()),
        }

    @property
    def queries(self) -> Iterator[Query]:
        """Yield every expression of the dashboard."""
        for row in self.rows:
            for panel in row.panels:
                yield from panel.queries
        for annotation in self.annotations:
            yield Query(annotation.expr, annotation.name, annotation.empty_unless)

    def _make_panels(self) -> Iterator[Json]:
        panel_id, y = 1, 0
        for row in self.rows:
            yield _make_heading(row.title, panel_id, y)
            panel_id, y = panel_id + 1, y + _ROW_HEIGHT
            x = height = 0
            for panel in row.panels:
                if x + panel.width > GRID_COLUMNS:
                    x, y, height = 0, y + height, 0
                yield panel.to_json(panel_id, x, y)
                panel_id, x, height = panel_id + 1, x + panel.width, max(height, panel.height)
            y += height


_LINKS = {
    "title": "Ludus",
    "type": "dashboards",
    "tags": [TAG],
    "asDropdown": False,
    "includeVars": True,
    "keepTime": True,
    "targetBlank": False,
}


def _make_heading(title: str, panel_id: int, y: int) -> Json:
    return {
        "id": panel_id,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"h": _ROW_HEIGHT, "w": GRID_COLUMNS, "x": 0, "y": y},
        "panels": [],
    }

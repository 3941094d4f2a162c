"""All runs and the fleet at a glance: is anything wrong, and which page says more."""

from __future__ import annotations

from grafana import variables
from grafana.model import Dashboard, Panel, Query, Row
from grafana.queries import (
    NAMESPACE,
    OF_RUN,
    PLAYED,
    RUN,
    capacity,
    evaluated,
    gateway,
    gauge,
    rate,
    servers,
    sessions,
    share,
)
from ludus.proto.metrics import EvalMetric, GatewayMetric, TrainMetric, TrainSeries

_BAD = ((1, "red"),)
_RUNS = f"{TrainSeries.RUN}{{{OF_RUN}}}"


def _stat(title: str, description: str, expr: str, **more: object) -> Panel:
    unit = str(more.pop("unit", "none"))
    query = Query(expr, title)
    return Panel(title, description, (query,), unit, "stat", width=4, height=4, **more)  # type: ignore[arg-type]


_NOW = Row(
    "Now",
    (
        _stat("Runs", "Runs whose driver is scraped.", f"count({_RUNS}) or vector(0)"),
        _stat(
            "Alerts",
            "Alerts of Ludus that fire; each names its page under docs/runbooks.",
            f'count(ALERTS{{{NAMESPACE}, alertname=~"Ludus.+", alertstate="firing"}}) or vector(0)',
            thresholds=_BAD,
        ),
        _stat(
            "Sessions",
            "Open sessions on servers that take new ones.",
            f"sum({sessions('active')})",
        ),
        _stat(
            "Saturation",
            "Open sessions of all that the fleet can hold.",
            f"sum({sessions('active')}) / (sum({capacity()}) > 0)",
            unit="percentunit",
            thresholds=((0.75, "yellow"), (0.9, "red")),
        ),
        _stat(
            "Waiting",
            "Opens that wait for a free session.",
            f"sum({sessions('pending')})",
            thresholds=((1, "yellow"),),
        ),
        _stat(
            "Lost sessions",
            "Sessions of the last hour that ended through no doing of their players.",
            f"sum(increase({gateway(GatewayMetric.SESSIONS_LOST, '_total')}[1h]))",
            decimals=0,
            thresholds=_BAD,
        ),
    ),
)


def _column(expr: str) -> Query:
    return Query(expr, "{{run}}")


_TABLE = Panel(
    "Runs",
    "Each run as it stands. The win rate is that of the newest evaluation, averaged over its "
    "environments; its page tells them apart.",
    (
        _column(gauge(TrainSeries.STEP)),
        _column(gauge(TrainSeries.TARGET_STEPS)),
        _column(f"avg by ({RUN}) ({evaluated(EvalMetric.WIN_RATE, 'trained')})"),
        _column(f"avg by ({RUN}) ({gauge(TrainMetric.REWARD_MEAN, PLAYED)})"),
        _column(gauge(TrainMetric.ENTROPY)),
        _column(gauge(TrainMetric.TOKENS_PER_SECOND)),
        _column(gauge(TrainSeries.WORKERS)),
        _column(f"time() - {gauge(TrainSeries.LAST_STEP)}"),
    ),
    "short",
    kind="table",
    width=24,
    height=7,
    columns={
        "run": "Run",
        "Value #A": "Step",
        "Value #B": "of",
        "Value #C": "Win rate",
        "Value #D": "Reward",
        "Value #E": "Entropy (nats)",
        "Value #F": "Tokens/s",
        "Value #G": "Workers",
        "Value #H": "Seconds since the last step",
    },
)
_RUNS_ROW = Row(
    "Runs",
    (
        _TABLE,
        Panel(
            "Evaluated win rate",
            "Win rate of the trained policy on the evaluation's seeds.",
            (Query(evaluated(EvalMetric.WIN_RATE, "trained"), "{{run}}: {{environment}}"),),
            "percentunit",
            min=0,
            max=1,
        ),
        Panel(
            "Reward",
            "Mean reward of the newest step's episodes.",
            (Query(gauge(TrainMetric.REWARD_MEAN, PLAYED), "{{run}}: {{environment}}"),),
            "none",
        ),
        Panel(
            "Steps per minute",
            "Optimizer batches taken.",
            (Query(f"60 * {rate(TrainSeries.STEPS)}", "{{run}}"),),
            "suffix: /min",
            min=0,
        ),
    ),
)
_FLEET = Row(
    "Fleet",
    (
        Panel(
            "Sessions",
            "Open sessions, and those that the servers can hold.",
            (
                Query(sessions("active"), "{{env}}"),
                Query(capacity(), "{{env}}: capacity"),
            ),
            "suffix: sessions",
            min=0,
        ),
        Panel(
            "Servers",
            "Environment servers that take new sessions.",
            (Query(servers("ready"), "{{env}}"),),
            "suffix: servers",
            min=0,
            decimals=0,
        ),
        Panel(
            "Voided episodes",
            "Share of the episodes that infrastructure voided, as the runs saw it.",
            (
                Query(
                    share(TrainMetric.NUM_EPISODES_LOST, TrainMetric.NUM_EPISODES, PLAYED),
                    "{{run}}: {{environment}}",
                ),
            ),
            "percentunit",
            min=0,
        ),
    ),
)

OVERVIEW = Dashboard(
    uid="ludus-overview",
    title="Ludus / Overview",
    description="All runs and the fleet at a glance.",
    variables=(
        variables.DATASOURCE,
        variables.NAMESPACES,
        variables.RUNS,
        variables.ENVIRONMENTS,
        variables.WINDOW,
    ),
    rows=(_NOW, _RUNS_ROW, _FLEET),
)

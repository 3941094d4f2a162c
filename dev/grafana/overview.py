"""Dashboard with an overview of all runs and the fleet."""

from __future__ import annotations

from grafana import variables
from grafana.model import Dashboard, Panel, Query, Row
from grafana.queries import (
    NAMESPACE,
    OF_RUN,
    PLAYED,
    RUN,
    capacity,
    evaluation,
    gateway,
    gauge,
    rate,
    servers,
    sessions,
    share,
)
from ludus.proto.metrics import EvalMetric, GatewayMetric, TrainMetric, TrainSeries

_RED_THRESHOLDS = ((1, "red"),)
_RUNS = f"{TrainSeries.RUN}{{{OF_RUN}}}"


def _make_stat(title: str, description: str, expr: str, **options: object) -> Panel:
    unit = str(options.pop("unit", "none"))
    query = Query(expr, title)
    return Panel(title, description, (query,), unit, "stat", width=4, height=4, **options)  # type: ignore[arg-type]


_NOW_ROW = Row(
    "Now",
    (
        _make_stat("Runs", "Runs with a scraped driver.", f"count({_RUNS}) or vector(0)"),
        _make_stat(
            "Alerts",
            "Firing alerts of Ludus; each has a page in docs/runbooks.",
            f'count(ALERTS{{{NAMESPACE}, alertname=~"Ludus.+", alertstate="firing"}}) or vector(0)',
            thresholds=_RED_THRESHOLDS,
        ),
        _make_stat(
            "Sessions",
            "Open sessions on servers that accept new ones.",
            f"sum({sessions('active')})",
        ),
        _make_stat(
            "Saturation",
            "Open sessions as a share of the fleet's capacity.",
            f"sum({sessions('active')}) / (sum({capacity()}) > 0)",
            unit="percentunit",
            thresholds=((0.75, "yellow"), (0.9, "red")),
        ),
        _make_stat(
            "Waiting",
            "Opens that wait for a free session.",
            f"sum({sessions('pending')})",
            thresholds=((1, "yellow"),),
        ),
        _make_stat(
            "Lost sessions",
            "Sessions in the last hour that ended because their server was lost.",
            f"sum(increase({gateway(GatewayMetric.SESSIONS_LOST, '_total')}[1h]))",
            decimals=0,
            thresholds=_RED_THRESHOLDS,
        ),
    ),
)


def _make_column(expr: str) -> Query:
    return Query(expr, "{{run}}")


_RUNS_PANEL = Panel(
    "Runs",
    "Current state of each run. The win rate is from the newest evaluation, averaged over all "
    "environments; the run's page shows each environment.",
    (
        _make_column(gauge(TrainSeries.STEP)),
        _make_column(gauge(TrainSeries.TARGET_STEPS)),
        _make_column(f"avg by ({RUN}) ({evaluation(EvalMetric.WIN_RATE, 'trained')})"),
        _make_column(f"avg by ({RUN}) ({gauge(TrainMetric.REWARD_MEAN, PLAYED)})"),
        _make_column(gauge(TrainMetric.ENTROPY)),
        _make_column(gauge(TrainMetric.TOKENS_PER_SECOND)),
        _make_column(gauge(TrainSeries.WORKERS)),
        _make_column(f"time() - {gauge(TrainSeries.LAST_STEP)}"),
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
        _RUNS_PANEL,
        Panel(
            "Evaluated win rate",
            "Win rate of the trained policy on the evaluation seeds.",
            (Query(evaluation(EvalMetric.WIN_RATE, "trained"), "{{run}}: {{environment}}"),),
            "percentunit",
            min=0,
            max=1,
        ),
        Panel(
            "Reward",
            "Mean reward of the episodes of the newest step.",
            (Query(gauge(TrainMetric.REWARD_MEAN, PLAYED), "{{run}}: {{environment}}"),),
            "none",
        ),
        Panel(
            "Steps per minute",
            "Completed training steps.",
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
            "Open sessions and the capacity of the servers.",
            (
                Query(sessions("active"), "{{env}}"),
                Query(capacity(), "{{env}}: capacity"),
            ),
            "suffix: sessions",
            min=0,
        ),
        Panel(
            "Servers",
            "Environment servers that accept new sessions.",
            (Query(servers("ready"), "{{env}}"),),
            "suffix: servers",
            min=0,
            decimals=0,
        ),
        Panel(
            "Void episodes",
            "Share of the runs' episodes that were voided because infrastructure failed.",
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
    description="Overview of all runs and the fleet.",
    variables=(
        variables.DATASOURCE,
        variables.NAMESPACES,
        variables.RUNS,
        variables.ENVIRONMENTS,
        variables.WINDOW,
    ),
    rows=(_NOW_ROW, _RUNS_ROW, _FLEET),
)

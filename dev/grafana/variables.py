"""Selections at the top of the dashboards."""

from __future__ import annotations

from grafana.model import Variable
from grafana.queries import NAMESPACE
from ludus.proto.metrics import GatewayMetric, TrainMetric, TrainSeries, prometheus_name

_PLAYED = f"{prometheus_name(TrainMetric.NUM_EPISODES)}_total"

DATASOURCE = Variable(
    "datasource",
    "Prometheus",
    "The Prometheus that scrapes the chart's monitors.",
    "prometheus",
    type="datasource",
    multiple=False,
)
NAMESPACES = Variable(
    "namespace",
    "Namespace",
    "Namespace of the release.",
    f'label_values({{__name__=~"{TrainSeries.RUN}|{GatewayMetric.BUILD}_info"}}, namespace)',
)
RUNS = Variable(
    "run", "Run", "Names of the runs.", f"label_values({TrainSeries.RUN}{{{NAMESPACE}}}, run)"
)
ONE_RUN = Variable(
    "run",
    "Run",
    "The run shown on the page.",
    f"label_values({TrainSeries.RUN}{{{NAMESPACE}}}, run)",
    multiple=False,
)
ENVIRONMENTS_OF_RUN = Variable(
    "environment",
    "Environment",
    "Environment names in the run.",
    f'label_values({_PLAYED}{{{NAMESPACE}, run=~"$run"}}, environment)',
)
ENVIRONMENTS_OF_FLEET = Variable(
    "environment",
    "Environment",
    "Environment names at the gateway.",
    f"label_values({GatewayMetric.SESSIONS}{{{NAMESPACE}}}, env)",
)
ENVIRONMENTS = Variable(
    "environment",
    "Environment",
    "Environment names at the gateway and in the runs.",
    f"query_result(group by (environment) ({_PLAYED}{{{NAMESPACE}}})"
    f" or group by (environment) (label_join({GatewayMetric.SESSIONS}{{{NAMESPACE}}},"
    ' "environment", "", "env")))',
    regex='/environment="([^"]+)"/',
)
WINDOW = Variable(
    "window",
    "Window",
    "Time range of counts. A longer window gives smoother curves and narrower intervals.",
    "1m,5m,15m,1h,6h",
    type="custom",
    multiple=False,
    default="5m",
)

"""What a person chooses at the top of a dashboard."""

from __future__ import annotations

from grafana.model import Variable
from grafana.queries import NAMESPACE
from ludus.proto.metrics import GatewayMetric, TrainMetric, TrainSeries, prometheus_name

_PLAYED = f"{prometheus_name(TrainMetric.NUM_EPISODES)}_total"

DATASOURCE = Variable(
    "datasource",
    "Prometheus",
    "The Prometheus that follows the chart's monitors.",
    "prometheus",
    type="datasource",
    multiple=False,
)
NAMESPACES = Variable(
    "namespace",
    "Namespace",
    "Where the release is installed.",
    f'label_values({{__name__=~"{TrainSeries.RUN}|{GatewayMetric.BUILD}_info"}}, namespace)',
)
RUNS = Variable(
    "run", "Run", "Runs by their names.", f"label_values({TrainSeries.RUN}{{{NAMESPACE}}}, run)"
)
ONE_RUN = Variable(
    "run",
    "Run",
    "The run that the page is about.",
    f"label_values({TrainSeries.RUN}{{{NAMESPACE}}}, run)",
    multiple=False,
)
ENVIRONMENTS_OF_RUN = Variable(
    "environment",
    "Environment",
    "Environments as the run calls them.",
    f'label_values({_PLAYED}{{{NAMESPACE}, run=~"$run"}}, environment)',
)
ENVIRONMENTS_OF_FLEET = Variable(
    "environment",
    "Environment",
    "Environments as the gateway calls them.",
    f"label_values({GatewayMetric.SESSIONS}{{{NAMESPACE}}}, env)",
)
ENVIRONMENTS = Variable(
    "environment",
    "Environment",
    "Environments as the gateway calls them, and as the runs do.",
    f"query_result(group by (environment) ({_PLAYED}{{{NAMESPACE}}})"
    f" or group by (environment) (label_join({GatewayMetric.SESSIONS}{{{NAMESPACE}}},"
    ' "environment", "", "env")))',
    regex='/environment="([^"]+)"/',
)
WINDOW = Variable(
    "window",
    "Window",
    "The time that counts are taken over: longer is smoother, and its intervals are narrower.",
    "1m,5m,15m,1h,6h",
    type="custom",
    multiple=False,
    default="5m",
)

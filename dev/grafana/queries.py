"""PromQL expressions shared by the dashboards.

The expressions use the enumerations of `ludus.proto.metrics`, so that they follow renamed
metrics. The selections at the top of a page are $namespace, $run, $environment and $window.
"""

from __future__ import annotations

from ludus.proto.metrics import (
    EnvServerMetric,
    EvalMetric,
    GatewayMetric,
    Reduction,
    TrainMetric,
    TrainSeries,
    prometheus_name,
)

NAMESPACE = 'namespace=~"$namespace"'
OF_RUN = f'{NAMESPACE}, run=~"$run"'
OF_ENVIRONMENT = f'{OF_RUN}, environment=~"$environment"'
AT_GATEWAY = f'{NAMESPACE}, env=~"$environment"'
AT_SERVER = f'{NAMESPACE}, environment=~"$environment"'
"""Selector of environment servers. Their label `env` contains the package; the chart's monitor
adds the label `environment` with the name in the release."""
WINDOW = "$window"
RATE = "$__rate_interval"

RUN = "namespace, run"
PLAYED = "namespace, run, environment, opponent"
_Z = 1.96
"""z-score of a 95 % interval."""


def format_name(metric: TrainMetric | EvalMetric | TrainSeries) -> str:
    """Return the name of the metric in Prometheus."""
    if isinstance(metric, TrainSeries):
        return f"{metric}_total" if metric is TrainSeries.STEPS else metric
    is_counter = isinstance(metric, TrainMetric) and metric.spec.reduction is Reduction.SUM
    return prometheus_name(metric) + ("_total" if is_counter else "")


def gauge(metric: TrainMetric | TrainSeries, labels: str = RUN, filters: str = "") -> str:
    """Return the newest value; the pods of a moved run share one series."""
    return f"max by ({labels}) ({format_name(metric)}{{{_selector(metric, labels, filters)}}})"


def evaluation(metric: EvalMetric, policy: str = ".*") -> str:
    """Return a value of the newest evaluation, by policy."""
    selector = f'{OF_ENVIRONMENT}, policy=~"{policy}"'
    return f"max by ({PLAYED}, policy) ({format_name(metric)}{{{selector}}})"


def increase(metric: TrainMetric | TrainSeries, labels: str = RUN, window: str = WINDOW) -> str:
    """Return the increase of a counter over the window."""
    series = f"{format_name(metric)}{{{_selector(metric, labels)}}}"
    return f"sum by ({labels}) (increase({series}[{window}]))"


def rate(metric: TrainMetric | TrainSeries, labels: str = RUN, window: str = WINDOW) -> str:
    """Return the increase of a counter per second."""
    return (
        f"sum by ({labels}) (rate({format_name(metric)}{{{_selector(metric, labels)}}}[{window}]))"
    )


def share(part: TrainMetric, total: TrainMetric, labels: str = RUN) -> str:
    """Return the ratio of two counters' increases; empty if the second did not increase."""
    return f"{increase(part, labels)}\n  / ({increase(total, labels)} > 0)"


def per_step(metric: TrainMetric) -> str:
    """Return the increase of a counter per training step."""
    return f"{increase(metric)}\n  / ({increase(TrainSeries.STEPS)} > 0)"


def wilson(part: TrainMetric, total: TrainMetric, sign: str, labels: str = PLAYED) -> str:
    """Return a bound of the 95 % Wilson interval of a share; `sign` is + or -.

    (k + z^2/2 +- z sqrt(k (n - k) / n + z^2/4)) / (n + z^2)

    The extrapolation of `increase` can make k slightly greater than n.
    """
    k, n = increase(part, labels), f"({increase(total, labels)} > 0)"
    return (
        f"(\n  {k} + {_Z**2 / 2:.4f}"
        f"\n  {sign} {_Z} * sqrt({k} * clamp_min({n} - {k}, 0) / {n} + {_Z**2 / 4:.4f})"
        f"\n) / ({n} + {_Z**2:.4f})"
    )


def gateway(metric: GatewayMetric, suffix: str = "", filters: str = "") -> str:
    """Return a gateway's series of the selected environments."""
    return f"{metric}{suffix}{{{AT_GATEWAY}{filters}}}"


def server(metric: EnvServerMetric, suffix: str = "", filters: str = "") -> str:
    """Return the series of environment servers."""
    return f"{metric}{suffix}{{{AT_SERVER}{filters}}}"


def sessions(state: str) -> str:
    """Return sessions by environment; gateways share servers, but each has its own queue."""
    aggregation = "sum" if state == "pending" else "max"
    selector = gateway(GatewayMetric.SESSIONS, filters=f', state="{state}"')
    return f"{aggregation} by (namespace, env) ({selector})"


def capacity() -> str:
    """Return the capacity of the servers of an environment."""
    return f"max by (namespace, env) ({gateway(GatewayMetric.SESSION_CAPACITY)})"


def servers(state: str) -> str:
    """Return the number of servers of an environment, as the gateways report them."""
    selector = gateway(GatewayMetric.SERVERS, filters=f', state="{state}"')
    return f"max by (namespace, env) ({selector})"


def quantile(
    level: float, metric: GatewayMetric | EnvServerMetric, selector: str, labels: str
) -> str:
    """Return a quantile of a histogram."""
    buckets = f"sum by (le, {labels}) (rate({metric}_bucket{{{selector}}}[{RATE}]))"
    return f"histogram_quantile({level}, {buckets})"


def _selector(metric: TrainMetric | TrainSeries, labels: str, filters: str = "") -> str:
    is_per_environment = isinstance(metric, TrainMetric) and metric.spec.is_per_environment
    return (OF_ENVIRONMENT if is_per_environment and labels != RUN else OF_RUN) + filters

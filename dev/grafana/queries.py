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


def name(metric: TrainMetric | EvalMetric | TrainSeries) -> str:
    """Return the name of the metric in Prometheus."""
    if isinstance(metric, TrainSeries):
        return f"{metric}_total" if metric is TrainSeries.STEPS else metric
    is_counter = isinstance(metric, TrainMetric) and metric.spec.reduction is Reduction.SUM
    return prometheus_name(metric) + ("_total" if is_counter else "")


def gauge(metric: TrainMetric | TrainSeries, by: str = RUN, extra: str = "") -> str:
    """Return the newest value; the pods of a moved run share one series."""
    return f"max by ({by}) ({name(metric)}{{{_selector(metric, by, extra)}}})"


def evaluation(metric: EvalMetric, policy: str = ".*") -> str:
    """Return a value of the newest evaluation, by policy."""
    selector = f'{OF_ENVIRONMENT}, policy=~"{policy}"'
    return f"max by ({PLAYED}, policy) ({name(metric)}{{{selector}}})"


def increase(metric: TrainMetric | TrainSeries, by: str = RUN, window: str = WINDOW) -> str:
    """Return the increase of a counter over the window."""
    return f"sum by ({by}) (increase({name(metric)}{{{_selector(metric, by)}}}[{window}]))"


def rate(metric: TrainMetric | TrainSeries, by: str = RUN, window: str = WINDOW) -> str:
    """Return the increase of a counter per second."""
    return f"sum by ({by}) (rate({name(metric)}{{{_selector(metric, by)}}}[{window}]))"


def share(part: TrainMetric, total: TrainMetric, by: str = RUN) -> str:
    """Return the ratio of two counters' increases; empty if the second did not increase."""
    return f"{increase(part, by)}\n  / ({increase(total, by)} > 0)"


def per_step(metric: TrainMetric) -> str:
    """Return the increase of a counter per training step."""
    return f"{increase(metric)}\n  / ({increase(TrainSeries.STEPS)} > 0)"


def wilson(part: TrainMetric, total: TrainMetric, sign: str, by: str = PLAYED) -> str:
    """Return a bound of the 95 % Wilson interval of a share; `sign` is + or -.

    (k + z^2/2 +- z sqrt(k (n - k) / n + z^2/4)) / (n + z^2)

    The extrapolation of `increase` can make k slightly greater than n.
    """
    k, n = increase(part, by), f"({increase(total, by)} > 0)"
    return (
        f"(\n  {k} + {_Z**2 / 2:.4f}"
        f"\n  {sign} {_Z} * sqrt({k} * clamp_min({n} - {k}, 0) / {n} + {_Z**2 / 4:.4f})"
        f"\n) / ({n} + {_Z**2:.4f})"
    )


def gateway(metric: GatewayMetric, suffix: str = "", extra: str = "") -> str:
    """Return a gateway's series of the selected environments."""
    return f"{metric}{suffix}{{{AT_GATEWAY}{extra}}}"


def server(metric: EnvServerMetric, suffix: str = "", extra: str = "") -> str:
    """Return the series of environment servers."""
    return f"{metric}{suffix}{{{AT_SERVER}{extra}}}"


def sessions(state: str) -> str:
    """Return sessions by environment; gateways share servers, but each has its own queue."""
    over = "sum" if state == "pending" else "max"
    selected = gateway(GatewayMetric.SESSIONS, extra=f', state="{state}"')
    return f"{over} by (namespace, env) ({selected})"


def capacity() -> str:
    """Return the capacity of the servers of an environment."""
    return f"max by (namespace, env) ({gateway(GatewayMetric.SESSION_CAPACITY)})"


def servers(state: str) -> str:
    """Return the number of servers of an environment, as the gateways report them."""
    selected = gateway(GatewayMetric.SERVERS, extra=f', state="{state}"')
    return f"max by (namespace, env) ({selected})"


def quantile(q: float, metric: GatewayMetric | EnvServerMetric, selector: str, by: str) -> str:
    """Return a quantile of a histogram."""
    buckets = f"sum by (le, {by}) (rate({metric}_bucket{{{selector}}}[{RATE}]))"
    return f"histogram_quantile({q}, {buckets})"


def _selector(metric: TrainMetric | TrainSeries, by: str, extra: str = "") -> str:
    is_per_environment = isinstance(metric, TrainMetric) and metric.spec.is_per_environment
    return (OF_ENVIRONMENT if is_per_environment and by != RUN else OF_RUN) + extra

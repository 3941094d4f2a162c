"""Expressions that several dashboards share, built from the names that the code exports.

Every selector names its metric through the enumerations of `ludus.proto.metrics`, so that a
metric which is renamed there is renamed here. What a person chooses at the top of a page comes
in as $namespace, $run, $environment and $window.
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
"""Environment servers call `env` what their package is called; the label `environment`, which
says what the chart calls them, comes from the monitor that finds them."""
WINDOW = "$window"
RATE = "$__rate_interval"

RUN = "namespace, run"
PLAYED = "namespace, run, environment, opponent"
_Z = 1.96
"""Of a 95 % interval."""


def name(metric: TrainMetric | EvalMetric | TrainSeries) -> str:
    """What Prometheus calls the metric."""
    if isinstance(metric, TrainSeries):
        return f"{metric}_total" if metric is TrainSeries.STEPS else metric
    is_counter = isinstance(metric, TrainMetric) and metric.spec.reduction is Reduction.SUM
    return prometheus_name(metric) + ("_total" if is_counter else "")


def gauge(metric: TrainMetric | TrainSeries, by: str = RUN, extra: str = "") -> str:
    """The newest value; a run that was moved to another pod has one series all the same."""
    return f"max by ({by}) ({name(metric)}{{{_selector(metric, by, extra)}}})"


def evaluated(metric: EvalMetric, policy: str = ".*") -> str:
    """A value of the newest evaluation, by policy."""
    selector = f'{OF_ENVIRONMENT}, policy=~"{policy}"'
    return f"max by ({PLAYED}, policy) ({name(metric)}{{{selector}}})"


def increase(metric: TrainMetric | TrainSeries, by: str = RUN, window: str = WINDOW) -> str:
    """How much a counter grew over the window."""
    return f"sum by ({by}) (increase({name(metric)}{{{_selector(metric, by)}}}[{window}]))"


def rate(metric: TrainMetric | TrainSeries, by: str = RUN, window: str = WINDOW) -> str:
    """How much a counter grew per second."""
    return f"sum by ({by}) (rate({name(metric)}{{{_selector(metric, by)}}}[{window}]))"


def share(part: TrainMetric, whole: TrainMetric, by: str = RUN) -> str:
    """One counter's growth in another's; nothing where the other did not grow."""
    return f"{increase(part, by)}\n  / ({increase(whole, by)} > 0)"


def per_step(metric: TrainMetric) -> str:
    """A counter's growth in an optimizer step."""
    return f"{increase(metric)}\n  / ({increase(TrainSeries.STEPS)} > 0)"


def wilson(part: TrainMetric, whole: TrainMetric, sign: str, by: str = PLAYED) -> str:
    """An end of the 95 % Wilson interval of a share; `sign` is + or -.

    (k + z^2/2 +- z sqrt(k (n - k) / n + z^2/4)) / (n + z^2)

    What `increase` extrapolates may leave k a little above n.
    """
    k, n = increase(part, by), f"({increase(whole, by)} > 0)"
    return (
        f"(\n  {k} + {_Z**2 / 2:.4f}"
        f"\n  {sign} {_Z} * sqrt({k} * clamp_min({n} - {k}, 0) / {n} + {_Z**2 / 4:.4f})"
        f"\n) / ({n} + {_Z**2:.4f})"
    )


def gateway(metric: GatewayMetric, suffix: str = "", extra: str = "") -> str:
    """A gateway's series of the environments that are chosen."""
    return f"{metric}{suffix}{{{AT_GATEWAY}{extra}}}"


def server(metric: EnvServerMetric, suffix: str = "", extra: str = "") -> str:
    """Environment servers' series."""
    return f"{metric}{suffix}{{{AT_SERVER}{extra}}}"


def sessions(state: str) -> str:
    """Sessions by environment. Gateways report the same servers, but queues of their own."""
    over = "sum" if state == "pending" else "max"
    selected = gateway(GatewayMetric.SESSIONS, extra=f', state="{state}"')
    return f"{over} by (namespace, env) ({selected})"


def capacity() -> str:
    """Sessions that the servers of an environment can hold."""
    return f"max by (namespace, env) ({gateway(GatewayMetric.SESSION_CAPACITY)})"


def servers(state: str) -> str:
    """Servers of an environment, as the gateways see them."""
    selected = gateway(GatewayMetric.SERVERS, extra=f', state="{state}"')
    return f"max by (namespace, env) ({selected})"


def quantile(q: float, metric: GatewayMetric | EnvServerMetric, selector: str, by: str) -> str:
    """A quantile from a histogram's buckets."""
    buckets = f"sum by (le, {by}) (rate({metric}_bucket{{{selector}}}[{RATE}]))"
    return f"histogram_quantile({q}, {buckets})"


def _selector(metric: TrainMetric | TrainSeries, by: str, extra: str = "") -> str:
    is_per_environment = isinstance(metric, TrainMetric) and metric.spec.is_per_environment
    return (OF_ENVIRONMENT if is_per_environment and by != RUN else OF_RUN) + extra

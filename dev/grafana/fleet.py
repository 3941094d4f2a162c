"""Dashboard of the environment fleet: sessions, queue, latency, losses and servers."""

from __future__ import annotations

from grafana import variables
from grafana.model import Dashboard, Panel, Query, Row
from grafana.queries import (
    AT_GATEWAY,
    AT_SERVER,
    NAMESPACE,
    RATE,
    capacity,
    gateway,
    quantile,
    server,
    servers,
    sessions,
)
from ludus.proto.metrics import EnvServerMetric, GatewayMetric

_QUANTILES = (0.5, 0.95, 0.99)
_BY_ENV = "sum by (namespace, env)"


def _rate(metric: GatewayMetric, filters: str = "") -> str:
    return f"rate({gateway(metric, '_total', filters)}[{RATE}])"


def _make_latency(call: str, empty_unless: str | None = None) -> tuple[Query, ...]:
    selector = f'{AT_GATEWAY}, call="{call}"'
    return tuple(
        Query(
            quantile(level, GatewayMetric.CALL_SECONDS, selector, "env"),
            f"{{{{env}}}}: p{level * 100:g}",
            empty_unless,
        )
        for level in _QUANTILES
    )


_SESSIONS = Row(
    "Sessions",
    (
        Panel(
            "Sessions: $environment",
            "Open sessions on servers that accept new ones and on draining servers, waiting opens, "
            "and the capacity of the servers.",
            (
                Query(sessions("active"), "active"),
                Query(sessions("draining"), "on draining servers"),
                Query(sessions("pending"), "waiting"),
                Query(capacity(), "capacity"),
            ),
            "suffix: sessions",
            width=12,
            min=0,
            repeat="environment",
        ),
        Panel(
            "Saturation",
            "Open sessions as a share of the capacity. Autoscaling aims at three quarters; at 100 "
            "% opens wait.",
            (Query(f"{sessions('active')}\n  / ({capacity()} > 0)", "{{env}}"),),
            "percentunit",
            min=0,
            max=1,
        ),
        Panel(
            "Opens per second",
            "Requested sessions by outcome.",
            (
                Query(
                    f"sum by (env, outcome) ({_rate(GatewayMetric.OPENS)})",
                    "{{env}}: {{outcome}}",
                ),
            ),
            "suffix: /s",
            min=0,
        ),
        Panel(
            "Wait for a free session",
            "Time that opens waited in the queue, with or without success.",
            tuple(
                Query(
                    quantile(level, GatewayMetric.QUEUE_WAIT_SECONDS, AT_GATEWAY, "env"),
                    f"{{{{env}}}}: p{level * 100:g}",
                    empty_unless="opens had to wait",
                )
                for level in _QUANTILES
            ),
            "s",
            min=0,
        ),
    ),
)
_FAILURES = Row(
    "Failures",
    (
        Panel(
            "Lost sessions",
            "Sessions per minute that ended because their server is gone.",
            (Query(f"60 * {_BY_ENV} ({_rate(GatewayMetric.SESSIONS_LOST)})", "{{env}}"),),
            "suffix: /min",
            min=0,
        ),
        Panel(
            "Failed calls",
            "Failed calls per second by error code; docs/errors.md explains the codes.",
            (
                Query(
                    "sum by (env, code) (" + _rate(GatewayMetric.CALLS, ', code!="OK"') + ") > 0",
                    "{{env}}: {{code}}",
                    empty_unless="calls fail",
                ),
            ),
            "suffix: /s",
            min=0,
        ),
        Panel(
            "Refused calls",
            "Calls per second that were refused because of a tenant's quota or a token.",
            (
                Query(f"{_BY_ENV} ({_rate(GatewayMetric.RATE_LIMITED)})", "{{env}}: quota"),
                Query(
                    "sum by (kind) (rate("
                    f"{GatewayMetric.AUTH_FAILURES}_total{{{NAMESPACE}}}[{RATE}]))",
                    "token {{kind}}",
                ),
            ),
            "suffix: /s",
            min=0,
        ),
    ),
)
_LATENCY = Row(
    "Latency",
    (
        Panel(
            "Step duration at the gateway",
            "Time from a step's arrival at the gateway to its reply.",
            _make_latency("step"),
            "s",
            min=0,
        ),
        Panel(
            "Reset duration at the gateway",
            "Time from a reset's arrival at the gateway to its reply.",
            _make_latency(
                "reset", empty_unless="a session plays several episodes, which training does not do"
            ),
            "s",
            min=0,
        ),
        Panel(
            "Open duration at the gateway",
            "Time from the request of a session to the reply, including the wait in the queue.",
            _make_latency("open"),
            "s",
            min=0,
        ),
        Panel(
            "Step duration in the servers",
            "Duration of steps in environment servers, by bucket. The difference to the step "
            "duration at the gateway is the time of the network and the gateway.",
            (
                Query(
                    "sum by (le) (rate("
                    f"{EnvServerMetric.STEP_DURATION}_bucket{{{AT_SERVER}}}[{RATE}]))",
                    "{{le}}",
                ),
            ),
            "s",
            kind="heatmap",
            width=12,
        ),
        Panel(
            "Calls per second",
            "Completed calls by kind.",
            (Query(f"sum by (env, call) ({_rate(GatewayMetric.CALLS)})", "{{env}}: {{call}}"),),
            "suffix: /s",
            width=12,
            min=0,
        ),
    ),
)
_SERVERS = Row(
    "Servers",
    (
        Panel(
            "Servers",
            "Environment servers that are ready for new sessions, draining or unreachable, as the "
            "gateways report them.",
            tuple(
                Query(servers(state), f"{{{{env}}}}: {state}")
                for state in ("ready", "draining", "unreachable")
            ),
            "suffix: servers",
            min=0,
            decimals=0,
        ),
        Panel(
            "Sessions per server",
            "Open sessions of each server. Placement balances them, and a scale-in removes the "
            "servers with the fewest.",
            (Query(f"max by (pod) ({server(EnvServerMetric.SESSIONS)})", "{{pod}}"),),
            "suffix: sessions",
            min=0,
        ),
        Panel(
            "Draining servers",
            "Servers that accept no new sessions; each stops after its last session.",
            (Query(f"sum({server(EnvServerMetric.DRAINING)})", "draining"),),
            "suffix: servers",
            min=0,
            decimals=0,
        ),
        Panel(
            "Steps per second per server",
            "Completed steps of each server.",
            (
                Query(
                    f"sum by (pod) (rate({server(EnvServerMetric.STEPS, '_total')}[{RATE}]))",
                    "{{pod}}",
                ),
            ),
            "suffix: /s",
            min=0,
        ),
        Panel(
            "Ended sessions",
            "Sessions per second that ended in the servers, by reason. Players do not cause the "
            "reasons idle, timeout and lost.",
            (
                Query(
                    "sum by (reason) (rate("
                    f"{server(EnvServerMetric.SESSION_ENDS, '_total')}[{RATE}]))",
                    "{{reason}}",
                ),
            ),
            "suffix: /s",
            min=0,
        ),
        Panel(
            "Worker processes",
            "Worker processes of the servers, and the number per minute that died or were killed.",
            (
                Query(
                    f"sum by (pod) ({server(EnvServerMetric.WORKERS)})",
                    "{{pod}}",
                    empty_unless="sessions run in worker processes",
                ),
                Query(
                    "60 * sum by (pod) (rate("
                    f"{server(EnvServerMetric.WORKER_ENDS, '_total')}[{RATE}]))",
                    "{{pod}}: died per minute",
                    empty_unless="sessions run in worker processes",
                ),
            ),
            "none",
            min=0,
        ),
        Panel(
            "Gateways",
            "Scraped gateways by version.",
            (
                Query(
                    f"count by (version) ({GatewayMetric.BUILD}_info{{{NAMESPACE}}})",
                    "{{version}}",
                ),
            ),
            "none",
            kind="stat",
            width=12,
            height=5,
            decimals=0,
        ),
        Panel(
            "Failed calls in the servers",
            "Error replies per second of environment servers, by code.",
            (
                Query(
                    f"sum by (code) (rate({server(EnvServerMetric.ERRORS, '_total')}[{RATE}])) > 0",
                    "{{code}}",
                    empty_unless="calls fail",
                ),
            ),
            "suffix: /s",
            width=12,
            height=5,
            min=0,
        ),
    ),
)

FLEET = Dashboard(
    uid="ludus-fleet",
    title="Ludus / Environment fleet",
    description="Sessions, queue, latency, losses and servers.",
    variables=(
        variables.DATASOURCE,
        variables.NAMESPACES,
        variables.ENVIRONMENTS_OF_FLEET,
    ),
    rows=(_SESSIONS, _FAILURES, _LATENCY, _SERVERS),
)

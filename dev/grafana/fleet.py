"""The environment fleet: sessions, queue, latency, what is lost, and the servers themselves."""

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
_OF_ENV = "sum by (namespace, env)"


def _rate(metric: GatewayMetric, extra: str = "") -> str:
    return f"rate({gateway(metric, '_total', extra)}[{RATE}])"


def _latency(call: str, empty_unless: str | None = None) -> tuple[Query, ...]:
    selector = f'{AT_GATEWAY}, call="{call}"'
    return tuple(
        Query(
            quantile(q, GatewayMetric.CALL_SECONDS, selector, "env"),
            f"{{{{env}}}}: p{q * 100:g}",
            empty_unless,
        )
        for q in _QUANTILES
    )


_SESSIONS = Row(
    "Sessions",
    (
        Panel(
            "Sessions: $environment",
            "Open sessions on servers that take new ones, on servers that drain, and opens that "
            "wait, against what the servers can hold.",
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
            "Open sessions of those that the servers can hold. Autoscaling aims at three "
            "quarters; at 100 % opens wait.",
            (Query(f"{sessions('active')}\n  / ({capacity()} > 0)", "{{env}}"),),
            "percentunit",
            min=0,
            max=1,
        ),
        Panel(
            "Opens per second",
            "Sessions that were asked for, by how that ended.",
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
            "How long opens stood in the queue before they had a session or gave up.",
            tuple(
                Query(
                    quantile(q, GatewayMetric.QUEUE_WAIT_SECONDS, AT_GATEWAY, "env"),
                    f"{{{{env}}}}: p{q * 100:g}",
                    empty_unless="opens had to wait",
                )
                for q in _QUANTILES
            ),
            "s",
            min=0,
        ),
    ),
)
_LOST = Row(
    "What went wrong",
    (
        Panel(
            "Lost sessions",
            "Sessions per minute that ended through no doing of their players, because their "
            "server is gone.",
            (Query(f"60 * {_OF_ENV} ({_rate(GatewayMetric.SESSIONS_LOST)})", "{{env}}"),),
            "suffix: /min",
            min=0,
        ),
        Panel(
            "Failed calls",
            "Calls per second that the gateways answered with an error, by its code; "
            "docs/errors.md says what each means.",
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
            "Calls per second that were refused: by a tenant's quota, or for their token.",
            (
                Query(f"{_OF_ENV} ({_rate(GatewayMetric.RATE_LIMITED)})", "{{env}}: quota"),
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
            "A step, through the gateway",
            "From a step's arrival at the gateway to its answer.",
            _latency("step"),
            "s",
            min=0,
        ),
        Panel(
            "A reset, through the gateway",
            "From a reset's arrival at the gateway to its answer.",
            _latency("reset", empty_unless="sessions play again: training opens one per episode"),
            "s",
            min=0,
        ),
        Panel(
            "An open, through the gateway",
            "From the wish for a session to its answer, the wait in the queue included.",
            _latency("open"),
            "s",
            min=0,
        ),
        Panel(
            "Steps in the servers",
            "How long environment servers took for a step, by bucket: the difference to the "
            "gateway's figure is the network and the gateway itself.",
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
            "Calls that the gateways answered, by kind.",
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
            "Environment servers as the gateways see them: ready for new sessions, draining, "
            "and out of reach.",
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
            "Open sessions of each server: placement keeps them even, and scale-in takes the "
            "emptiest.",
            (Query(f"max by (pod) ({server(EnvServerMetric.SESSIONS)})", "{{pod}}"),),
            "suffix: sessions",
            min=0,
        ),
        Panel(
            "Draining servers",
            "Servers that take no new sessions; each ends when its last session has.",
            (Query(f"sum({server(EnvServerMetric.DRAINING)})", "draining"),),
            "suffix: servers",
            min=0,
            decimals=0,
        ),
        Panel(
            "Steps per second and server",
            "Steps that each server answered.",
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
            "How sessions end",
            "Sessions per second that ended in the servers, by reason: idle, timeout and lost "
            "are not the players' doing.",
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
            "Processes that run sessions within the servers, and per minute those that died or "
            "were killed.",
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
            "Gateways that are scraped, by version.",
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
            "Errors per second that environment servers answered with, by code.",
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
    description="Sessions, queue, latency, what is lost, and the servers themselves.",
    variables=(
        variables.DATASOURCE,
        variables.NAMESPACES,
        variables.ENVIRONMENTS_OF_FLEET,
    ),
    rows=(_SESSIONS, _LOST, _LATENCY, _SERVERS),
)

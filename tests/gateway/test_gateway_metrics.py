"""Prometheus metrics of a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from ludus.proto.errors import ErrorCode
from ludus.proto.metrics import GatewayMetric
from ludus.services.gateway.tenancy.access import AuthFailure, TenantAccess
from ludus.services.gateway.tenancy.metrics import (
    CallKind,
    EnvironmentLoad,
    GatewayMetrics,
    OpenOutcome,
)

PROMETHEUS_PROGRAM = os.environ.get("PROMETHEUS_BINARY") or shutil.which("prometheus") or ""
PROMTOOL_PROGRAM = os.environ.get("PROMTOOL_BINARY") or shutil.which("promtool") or ""
LABEL_NAMES = ("env", "state", "call", "outcome", "reason", "kind", "code", "le")


def render(metrics: GatewayMetrics, accept_types: str = "") -> tuple[bytes, str]:
    """Render the metrics in a new event loop; return the body and its content type."""
    return asyncio.run(metrics.render(accept_types))


def read_samples(metrics: GatewayMetrics) -> dict[tuple[str, ...], float]:
    """Return the value of each sample by (name, label values...)."""
    body, _ = render(metrics)
    return {
        (
            sample.name,
            *(sample.labels[key] for key in LABEL_NAMES if key in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def make_used_metrics() -> GatewayMetrics:
    loads = [
        EnvironmentLoad("blackjack", 3, 40, 2, 64, 4, 1, 2),
        EnvironmentLoad("not-configured", 9, 9, 9, 9, 9),
    ]
    metrics = GatewayMetrics(["blackjack", "chess"], lambda: loads)
    metrics.count_open("blackjack", "OK", 1, 0.2)
    metrics.count_open("blackjack", "OK", 8, 1.5)
    metrics.count_open("blackjack", ErrorCode.CAPACITY_REACHED, 8)
    metrics.count_open("blackjack", str(ErrorCode.RATE_LIMITED), 1)
    metrics.count_open("blackjack", ErrorCode.FACTORY_ERROR, 1, 4.0)
    for _ in range(256):
        metrics.count_call("blackjack", "step", "OK", 0.003)
    metrics.count_call("blackjack", "step", ErrorCode.ILLEGAL_ACTION, 0.001)
    for _ in range(16):
        metrics.count_call("blackjack", CallKind.STEP, ErrorCode.RATE_LIMITED, 0.0001)
    metrics.record_wait("blackjack", 0.05)
    metrics.count_lost("blackjack", 5)
    metrics.count_auth_failure(AuthFailure.UNKNOWN)
    return metrics


def test_events_are_counted_in_the_expected_series() -> None:
    values = read_samples(make_used_metrics())
    expected = {
        ("ludus_gateway_sessions", "blackjack", "pending"): 3,
        ("ludus_gateway_sessions", "blackjack", "active"): 40,
        ("ludus_gateway_sessions", "blackjack", "draining"): 2,
        ("ludus_gateway_session_capacity", "blackjack"): 64,
        ("ludus_gateway_servers", "blackjack", "ready"): 4,
        ("ludus_gateway_servers", "blackjack", "draining"): 1,
        ("ludus_gateway_servers", "blackjack", "unreachable"): 2,
        ("ludus_gateway_opens_total", "blackjack", "opened"): 9,
        ("ludus_gateway_opens_total", "blackjack", "no_capacity"): 8,
        ("ludus_gateway_opens_total", "blackjack", "rate_limited"): 1,
        ("ludus_gateway_opens_total", "blackjack", "failed"): 1,
        ("ludus_gateway_calls_total", "blackjack", "open", "OK"): 1,
        ("ludus_gateway_calls_total", "blackjack", "open_group", "OK"): 1,
        ("ludus_gateway_calls_total", "blackjack", "open_group", "CAPACITY_REACHED"): 1,
        ("ludus_gateway_calls_total", "blackjack", "step", "OK"): 256,
        ("ludus_gateway_calls_total", "blackjack", "step", "ILLEGAL_ACTION"): 1,
        ("ludus_gateway_calls_total", "blackjack", "step", "RATE_LIMITED"): 16,
        ("ludus_gateway_call_seconds_count", "blackjack", "step"): 273,
        ("ludus_gateway_call_seconds_count", "blackjack", "open"): 2,
        ("ludus_gateway_call_seconds_bucket", "blackjack", "step", "0.001"): 17,
        ("ludus_gateway_call_seconds_bucket", "blackjack", "step", "0.005"): 273,
        ("ludus_gateway_queue_wait_seconds_count", "blackjack"): 1,
        ("ludus_gateway_sessions_lost_total", "blackjack", "server_lost"): 5,
        ("ludus_gateway_rate_limited_total", "blackjack"): 17,
        ("ludus_gateway_auth_failures_total", "unknown"): 1,
    }
    assert {key: values[key] for key in expected} == expected
    assert values["ludus_gateway_call_seconds_sum", "blackjack", "step"] == pytest.approx(0.7706)
    assert not [key for key in values if "not-configured" in key]


@pytest.mark.slow
def test_every_series_exists_from_the_start() -> None:
    fresh_metrics, used_metrics = GatewayMetrics(["blackjack", "chess"]), make_used_metrics()
    samples = read_samples(fresh_metrics)
    assert samples.keys() == read_samples(used_metrics).keys()
    assert {value for (name, *_), value in samples.items() if not name.endswith("_info")} == {0.0}
    outcomes = {key[2] for key in samples if key[0] == "ludus_gateway_opens_total"}
    assert outcomes == set(OpenOutcome)
    assert ("ludus_gateway_calls_total", "chess", "step", "SESSION_LOST") in samples


def test_every_declared_metric_is_exported() -> None:
    exported_names = {
        family.name.removesuffix("_info")
        for family in text_string_to_metric_families(render(make_used_metrics())[0].decode())
    }
    assert exported_names == set(GatewayMetric)


@pytest.mark.slow
def test_both_prometheus_parsers_read_the_metrics() -> None:
    metrics = make_used_metrics()
    body, content_type = render(metrics, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics_families(body.decode())}
    assert names == set(GatewayMetric)
    text_body, content_type = render(metrics, "text/plain")
    assert content_type.startswith("text/plain")
    assert list(text_string_to_metric_families(text_body.decode()))


async def test_a_scrape_is_consistent_while_calls_are_counted() -> None:
    metrics = make_used_metrics()
    render_task = asyncio.create_task(metrics.render())
    while not render_task.done():
        metrics.count_call("chess", "step", "OK", 0.5)
        await asyncio.sleep(0)
    for family in text_string_to_metric_families(render_task.result()[0].decode()):
        values_by_name = {
            (sample.name, sample.labels.get("le")): sample.value
            for sample in family.samples
            if sample.labels.get("env") == "chess" and sample.labels.get("call") == "step"
        }
        if family.name == GatewayMetric.CALL_SECONDS:
            assert (
                values_by_name["ludus_gateway_call_seconds_bucket", "+Inf"]
                == (values_by_name["ludus_gateway_call_seconds_count", None])
            )


def test_refused_calls_are_counted_in_metrics() -> None:
    metrics = GatewayMetrics(["chess"])
    access = TenantAccess.from_token("0123456789abcdef0123")
    access.on_failure = metrics.count_auth_failure
    for authorization in ([], ["Bearer wrong"], ["nonsense"]):
        with pytest.raises(Exception, match="expected a token"):
            access.authenticate(*authorization)
    values = read_samples(metrics)
    for kind in ("missing", "unknown", "malformed"):
        assert values["ludus_gateway_auth_failures_total", kind] == 1


@pytest.mark.skipif(not PROMTOOL_PROGRAM, reason="promtool not found; set PROMTOOL_BINARY")
def test_promtool_check_reports_no_problems() -> None:
    body, _ = render(make_used_metrics(), "text/plain")
    process = subprocess.run(
        [PROMTOOL_PROGRAM, "check", "metrics"], input=body, capture_output=True
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, b"", b"")


# -- Prometheus process ----------------------------------------------------------------------


@contextmanager
def serve_metrics(metrics: GatewayMetrics) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, content_type = render(metrics, self.headers.get("accept", ""))
            self.send_response(200)
            self.send_header("content-type", content_type)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def run_prometheus(folder: Path, target_ports: list[int]) -> Iterator[str]:
    """Run a Prometheus that scrapes these ports, and yield its address."""
    addresses = ", ".join(f"'127.0.0.1:{port}'" for port in target_ports)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: gateway, static_configs: [{{targets: [{addresses}]}}]}}]\n"
    )
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                PROMETHEUS_PROGRAM,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        yield f"http://127.0.0.1:{find_port(process.pid, log)}"
    finally:
        process.terminate()
        process.wait(60)


def find_port(pid: int, log: Path) -> int:
    """Find the port in the kernel's socket tables, because the log contains only port 0."""
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s:
        sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                    return int(columns[1].rpartition(":")[2], 16)
        time.sleep(0.05)
    raise AssertionError(f"Prometheus did not open a port: {log.read_text()}")


def query_prometheus(address: str, query: str) -> dict[str, float]:
    """Run a query, and return its values by environment."""
    encoded_query = urllib.parse.quote(query)
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?query={encoded_query}") as response:
            samples = json.load(response)["data"]["result"]
    except urllib.error.HTTPError as error:
        assert error.code == 503, error  # Prometheus listens before it is ready
        return {}
    return {sample["metric"].get("env", ""): float(sample["value"][1]) for sample in samples}


def wait_for_samples(address: str, query: str, expected: dict[str, float]) -> None:
    """Wait until a query returns the expected values."""
    deadline_s = time.monotonic() + 120.0
    while (samples := query_prometheus(address, query)) != expected:
        assert time.monotonic() < deadline_s, f"query {query} returned {samples}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(
    not PROMETHEUS_PROGRAM or sys.platform != "linux",
    reason="Prometheus not found; set PROMETHEUS_BINARY",
)
def test_documented_queries_work_for_two_scraped_gateways(tmp_path: Path) -> None:
    with (
        serve_metrics(make_used_metrics()) as first_port,
        serve_metrics(make_used_metrics()) as second_port,
        run_prometheus(tmp_path, [first_port, second_port]) as address,
    ):
        demand_query = (
            'max by (env) (ludus_gateway_sessions{state="active"})'
            ' + sum by (env) (ludus_gateway_sessions{state="pending"})'
        )
        # A late scrape leaves a gap in the series, so the result may need another scrape.
        wait_for_samples(address, demand_query, {"blackjack": 46.0, "chess": 0.0})
        saturation_query = (
            'max by (env) (ludus_gateway_sessions{state="active"})'
            " / max by (env) (ludus_gateway_session_capacity)"
        )
        wait_for_samples(address, f"{saturation_query} > 0", {"blackjack": 40 / 64})
        wait_for_samples(address, "sum(up)", {"": 2.0})

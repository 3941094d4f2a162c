"""Health, readiness, drain and metrics requests of Kubernetes and Prometheus."""

import asyncio
import contextlib
import os
import re
import signal
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ludus.env.asgi.socket import truncate_reason
from ludus.env.encoding import ResetArgs
from ludus.env.http.app import build_app
from ludus.env.http.health import build_admin_app
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import make_local_host
from ludus.env.sessions.interface import Connection, OpenArgs
from ludus.env.sessions.options import ServerOptions
from ludus.env.sessions.tombstones import SessionEnd
from ludus.proto.errors import EnvError, ErrorCode
from ludus.proto.metrics import EnvServerMetric
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.polling import limit_steps, wait_for_sessions
from tests.env.served import serve

WORKERS_METRIC = "env_server_workers"
WORKER_ENDS_METRIC = "env_server_worker_ends_total"
WORKER_METRICS = {
    EnvServerMetric.WORKERS,
    EnvServerMetric.WORKER_ENDS,
    EnvServerMetric.SANDBOX_LAYER,
}


def make_core(factory=CountingEnv, **options) -> SessionCore:
    return SessionCore(make_local_host(factory), ServerOptions(**options))


def open_client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def read_series(client, headers=None) -> dict[tuple[str, str], float]:
    """Return the values by metric name and by the value of the label other than `env`."""
    response = await client.get("/metrics", headers=headers)
    assert response.status_code == 200
    values_by_series = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {**sample.labels}
            assert labels.pop("env") == "counting"
            values_by_series[sample.name, next(iter(labels.values()), "")] = sample.value
    return values_by_series


async def test_every_metric_exists_before_the_first_session() -> None:
    async with open_client(build_app(make_core(max_sessions=7))) as client:
        series = await read_series(client)
        for code in ErrorCode:
            assert series["env_server_errors_total", code] == 0
        for end in SessionEnd:
            assert series["env_server_session_ends_total", end] == 0
        assert series["env_server_step_duration_seconds_count", ""] == 0
        assert series["env_server_session_capacity", ""] == 7
        names = {name for name, _ in series}
        for metric in set(EnvServerMetric) - WORKER_METRICS:
            assert any(name.startswith(metric) for name in names)


@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_metrics_count_opens_resets_steps_and_errors(factory) -> None:
    core = make_core(factory)
    connection = Connection()
    session_id = (await core.open(OpenArgs(ResetArgs(1)), connection)).session_id
    await core.open_group(OpenArgs(), 2)
    for number in (1, 2, 0, 13):
        with contextlib.suppress(EnvError):
            await core.step(session_id, b'{"add":%d}' % number)
    await core.reset(session_id, ResetArgs())
    core.release(connection)
    async with open_client(build_app(core)) as client:
        series = await read_series(client)
    assert series["env_server_opens_total", ""] == 3
    assert series["env_server_resets_total", ""] == 4
    assert series["env_server_steps_total", ""] == 2
    assert series["env_server_errors_total", "ILLEGAL_ACTION"] == 1
    assert series["env_server_errors_total", "EXECUTION_ERROR"] == 1
    assert series["env_server_session_ends_total", "connection_ended"] == 1
    assert series["env_server_sessions", ""] == 2
    assert series["env_server_step_duration_seconds_count", ""] == 2
    assert 0 < series["env_server_step_duration_seconds_sum", ""] < 60
    await core.shut_down()


async def test_duration_buckets_are_cumulative() -> None:
    core = make_core()
    for duration_s in (0.000_05, 0.000_06, 0.3, 1000.0):
        core.counts.count_step(duration_s)
    async with open_client(build_app(core)) as client:
        series = await read_series(client)
    bucket = "env_server_step_duration_seconds_bucket"
    assert [series[bucket, bound] for bound in ("5e-05", "0.0001", "0.5", "60.0", "+Inf")] == [
        1,
        2,
        3,
        3,
        4,
    ]


@pytest.mark.slow
async def test_live_and_ended_workers_are_counted() -> None:
    async with (
        serve(isolation="pool", num_workers=2) as server,
        httpx.AsyncClient(base_url=server.http_address, timeout=60) as client,
    ):

        async def read_worker_counts() -> tuple[float, float]:
            series = await read_series(client)
            return series[WORKERS_METRIC, ""], series[WORKER_ENDS_METRIC, ""]

        async with asyncio.timeout(60):
            while await read_worker_counts() != (2, 0) or len(server.core.host.pids) < 2:
                await asyncio.sleep(0.02)
            os.kill(server.core.host.pids[0], signal.SIGKILL)
            while await read_worker_counts() != (2, 1):
                await asyncio.sleep(0.02)


async def test_applications_have_separate_metrics() -> None:
    first_core, second_core = make_core(), make_core()
    await first_core.open(OpenArgs())
    async with (
        open_client(build_app(first_core)) as first_client,
        open_client(build_app(second_core)) as second_client,
    ):
        assert (await read_series(first_client))["env_server_opens_total", ""] == 1
        assert (await read_series(second_client))["env_server_opens_total", ""] == 0


@pytest.mark.parametrize("build_application", [build_app, build_admin_app])
async def test_only_post_drains(build_application) -> None:
    for method in ("GET", "POST", "PUT", "HEAD"):
        core = make_core()
        async with open_client(build_application(core)) as client:
            status = (await client.request(method, "/drain")).status_code
        expected = (200, True) if method == "POST" else (405, False)
        assert (status, core.load.is_draining) == expected


async def test_draining_server_stays_ready_and_reports_remaining_sessions() -> None:
    core = make_core()
    session_id = (await core.open(OpenArgs(ResetArgs()))).session_id
    async with open_client(build_app(core)) as client:
        drain_status = (await client.post("/drain")).json()
        assert drain_status == {"is_draining": True, "num_sessions": 1, "num_waiting": 0}
        assert (await client.get("/readyz")).status_code == 200
        assert (await read_series(client))["env_server_draining", ""] == 1
        response = await client.post("/reset")
        assert (response.status_code, response.json()["detail"]["code"]) == (503, "DRAINING")
        response = await client.post("/step", json={"add": 1}, headers={"x-session-id": session_id})
        assert response.json()["observation"]["total"] == 1


async def test_drain_waits_for_the_last_session_until_the_timeout() -> None:
    core = make_core()
    session_id = (await core.open(OpenArgs())).session_id
    async with open_client(build_app(core)) as client:
        start_s = time.monotonic()
        drain_status = (await client.post("/drain?wait=0.2")).json()
        assert (drain_status["num_sessions"], time.monotonic() - start_s > 0.2) == (1, True)
        drain_task = asyncio.create_task(client.post("/drain?wait=60"))
        await asyncio.sleep(0.05)
        await core.close(session_id)
        assert (await asyncio.wait_for(drain_task, 60)).json()["num_sessions"] == 0
        for wait_text in ("-1", "nan", "inf", "x", "99999"):
            assert (await client.post(f"/drain?wait={wait_text}")).status_code == 422


@pytest.mark.slow
async def test_drain_and_metrics_need_the_token_except_on_the_admin_port() -> None:
    async with serve(token="hush") as server:
        url = server.http_address
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for path in ("/drain", "/metrics", "/openapi.json", "/session"):
                assert (await client.get(path)).status_code == 401
            assert not server.core.load.is_draining
            for path in ("/health", "/healthz", "/readyz"):
                response = await client.get(path)
                assert response.status_code == 200
                assert not re.search("counting|session|ludus", response.text)
            await read_series(client, {"authorization": "Bearer hush"})
        async with open_client(build_admin_app(server.core)) as client:
            for path in ("/healthz", "/readyz", "/metrics"):
                assert (await client.get(path)).status_code == 200
            assert (await client.post("/drain")).status_code == 200


@pytest.mark.slow
async def test_admin_port_needs_no_token_and_serves_no_environment_calls() -> None:
    async with serve(token="hush", admin_port=0) as server:
        assert serve().addresses.admin == ""
        async with httpx.AsyncClient(base_url=server.addresses.admin, timeout=60) as client:
            await read_series(client)
            for path in ("/reset", "/metadata", "/ws", "/mcp", "/session"):
                assert (await client.post(path)).status_code == 404
            for path in ("/healthz", "/readyz"):
                assert (await client.get(path)).status_code == 200
            assert not server.core.load.is_draining
            assert (await client.post("/drain")).json()["is_draining"] is True
            assert server.core.load.is_draining


async def test_ended_sessions_are_counted_by_kind(core_clock) -> None:
    core = make_core(ThreadedCountingEnv)
    closed_session = await core.open(OpenArgs())
    await core.close(closed_session.session_id)
    connection = Connection()
    await core.open(OpenArgs(), connection)
    core.release(connection)
    finished_session = await core.open(OpenArgs(ResetArgs(), close_when_done=True))
    await core.step(finished_session.session_id, b'{"add":7}')
    slow_session = await core.open(OpenArgs(ResetArgs()))
    with pytest.raises(EnvError):
        await core.step(slow_session.session_id, b'{"add":99}', timeout_s=0.05)
    await core.open(OpenArgs())
    sweep_task = asyncio.create_task(core.close_idle_forever())
    core_clock.advance(core.options.idle_timeout_s)
    await wait_for_sessions(core, 0)
    sweep_task.cancel()
    last_session = await core.open(OpenArgs())
    await core.shut_down()
    ends = {end: count for end, count in core.counts.num_ends_by_kind.items() if count}
    assert ends == dict.fromkeys(set(SessionEnd) - {SessionEnd.LOST}, 1)
    assert core.tombstones.find(last_session.session_id).kind is SessionEnd.SHUTDOWN


@pytest.mark.slow
async def test_session_on_the_worker_of_a_hanging_session_counts_as_lost() -> None:
    async with serve(isolation="pool", num_workers=1) as server:
        core = server.core
        hung_id, peer_id = [(await core.open(OpenArgs(ResetArgs()))).session_id for _ in range(2)]
        limit_steps(core, 0.3)
        with pytest.raises(EnvError):
            await core.step(hung_id, b'{"add":99}')
        await wait_for_sessions(core, 0)
        assert core.tombstones.find(hung_id).kind is SessionEnd.TIMEOUT
        assert core.tombstones.find(peer_id).kind is SessionEnd.LOST
        assert "took longer than" in core.tombstones.find(peer_id).reason


def test_reason_is_truncated_to_fit_into_a_close_frame() -> None:
    assert len(truncate_reason("ü" * 200).encode()) <= 123
    assert truncate_reason("short") == "short"

"""Trace contexts and request ids on every wire."""

import asyncio
import time
import timeit

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ludus.env.client import AsyncEnvClient, EnvClient
from ludus.env.security.tracing import (
    MAX_REQUEST_ID_CHARS,
    get_request_id,
    is_traced,
    make_trace_headers,
    open_server_span,
    request_id,
)
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.grpc_served import serve_grpc
from tests.env.legacy_server import legacy_server
from tests.env.served import serve

pytestmark = pytest.mark.asyncio

EXPORTER = InMemorySpanExporter()
PROVIDER = TracerProvider()
PROVIDER.add_span_processor(SimpleSpanProcessor(EXPORTER))
REQUEST_IDS: list[str] = []


@pytest.fixture(autouse=True)
def exporter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trace, "get_tracer", PROVIDER.get_tracer)
    EXPORTER.clear()
    REQUEST_IDS.clear()
    return EXPORTER


class RequestIdEnv(CountingEnv):
    """An environment that records the request id of each step."""

    def step(self, action):
        REQUEST_IDS.append(get_request_id())
        return super().step(action)


@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_server_spans_are_children_of_the_caller_span(factory, exporter) -> None:
    async with (
        serve_grpc(factory) as server,
        await AsyncEnvClient.connect(server.address) as client,
    ):
        with trace.get_tracer("test").start_as_current_span("episode") as span:
            session, _ = await client.open()
            await session.step({"add": 1})
            await session.reset(seed=1)
        await session.step({"add": 1})
    spans_by_name = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans_by_name) == {
        "episode",
        "ludus.env/open",
        "ludus.env/step",
        "ludus.env/reset",
    }
    caller_context = span.get_span_context()
    for name in ("open", "step", "reset"):
        server_span = spans_by_name[f"ludus.env/{name}"]
        assert server_span.context.trace_id == caller_context.trace_id
        assert server_span.parent.span_id == caller_context.span_id
        assert server_span.kind is trace.SpanKind.SERVER


async def test_a_request_id_reaches_the_environment() -> None:
    async with (
        serve_grpc(RequestIdEnv) as server,
        await AsyncEnvClient.connect(server.address) as client,
    ):
        session, _ = await client.open()
        with request_id("r-1"):
            await session.step({"add": 1})
        await session.step({"add": 1})
    assert REQUEST_IDS == ["r-1", ""]


async def test_sync_client_sends_the_request_id_of_the_caller() -> None:
    def step(address: str) -> None:
        with EnvClient.connect(address) as client:
            session, _ = client.open()
            with request_id("r-4"):
                session.step({"add": 1})
            session.step({"add": 1})

    async with serve_grpc(RequestIdEnv) as server:
        await asyncio.to_thread(step, server.address)
    assert REQUEST_IDS == ["r-4", ""]


async def test_concurrent_calls_keep_their_request_ids() -> None:
    async def step(session, text) -> None:
        with request_id(text):
            await session.step({"add": 1})

    async with (
        serve_grpc(RequestIdEnv) as server,
        await AsyncEnvClient.connect(server.address) as client,
    ):
        sessions = [(await client.open())[0] for _ in range(8)]
        await asyncio.gather(*(step(session, f"r-{n}") for n, session in enumerate(sessions)))
    assert sorted(REQUEST_IDS) == [f"r-{n}" for n in range(8)]


@pytest.mark.slow
async def test_http_calls_send_tracing_headers() -> None:
    with legacy_server() as (address, counter):
        async with await AsyncEnvClient.connect(address) as client:
            with request_id("r-2"), trace.get_tracer("test").start_as_current_span("episode"):
                await client.open()
    assert counter.headers[0]["x-request-id"] == "r-2"
    assert counter.headers[0]["traceparent"].startswith("00-")


async def test_traced_episode_can_be_played_over_websocket() -> None:
    async with serve() as server, await AsyncEnvClient.connect(server.http_address) as client:
        with request_id("r-3"), trace.get_tracer("test").start_as_current_span("episode"):
            session, _ = await client.open()
            assert (await session.step({"add": 1})).reward == 1.0


async def test_untraced_call_has_no_overhead() -> None:
    assert not is_traced()
    assert make_trace_headers() == {}
    duration_s = timeit.timeit(is_traced, timer=time.thread_time, number=20_000) / 20_000
    assert duration_s < 5e-6


async def test_request_id_cannot_inject_headers_or_log_lines() -> None:
    with request_id("r-5\r\nauthorization: x\u00e9"):
        assert get_request_id() == "r-5authorization:x"


async def test_malformed_trace_context_is_ignored(exporter) -> None:
    with open_server_span("step", "not a traceparent", "x" * 1000):
        assert len(get_request_id()) == MAX_REQUEST_ID_CHARS
    [span] = exporter.get_finished_spans()
    assert span.parent is None

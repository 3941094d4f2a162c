"""Limits of request size and duration, and request ids."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
import pytest
import websockets
from fastapi import Body, FastAPI, Request, WebSocket
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp

from ludus.env.security.tracing import current_request_id
from ludus.services.gateway.wires import request_limits
from ludus.services.gateway.wires.request_limits import (
    AddRequestIds,
    LimitBodies,
    choose_request_id,
)
from tests.gateway.gateways import NAME, CountingEnv, http_client, run_gateway
from tests.gateway.http_server import serving


def bounded(app: ASGIApp, timeout_s: float = 60.0) -> AddRequestIds:
    """Build the application with limits small enough for tests."""
    return AddRequestIds(LimitBodies(app, max_bytes=1000, timeout_s=timeout_s))


def build_app() -> FastAPI:
    app = FastAPI()

    @app.post("/count")
    async def count(request: Request) -> dict[str, int]:
        return {"num_bytes": len(await request.body())}

    @app.post("/parse")
    async def parse(body: Annotated[dict[str, str], Body()]) -> dict[str, int]:
        return {"num_keys": len(body)}

    @app.post("/ignore")
    async def ignore() -> str:
        return "unread"

    @app.get("/who")
    async def caller(request: Request) -> dict[str, str]:
        return {"request_id": request.headers["x-request-id"]}

    @app.websocket("/ws")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(websocket.headers["x-request-id"])
        await websocket.close()

    return app


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(bounded(build_app())) as port:
        yield port


def client_at(port: int) -> httpx.AsyncClient:
    """A raw connection, used with `async with`."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)


@pytest.fixture
async def client(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with client_at(port) as client:
        yield client


async def chunks(num: int, size: int = 100, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    for _ in range(num):
        yield b"x" * size
        await asyncio.sleep(pause_s)


def error_code(response: httpx.Response) -> str:
    assert response.headers["connection"] == "close"
    return response.json()["detail"]["code"]


async def raw(port: int, sent: bytes) -> bytes:
    """Return all bytes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


# -- bodies ----------------------------------------------------------------------------------


async def test_a_body_within_the_limit_arrives_whole(client: httpx.AsyncClient) -> None:
    assert (await client.post("/count", content=b"x" * 1000)).json() == {"num_bytes": 1000}
    assert (await client.post("/count", content=chunks(10))).json() == {"num_bytes": 1000}
    assert (await client.post("/count")).json() == {"num_bytes": 0}


@pytest.mark.parametrize("path", ["/count", "/parse"])
async def test_a_body_beyond_the_limit_is_refused_however_it_is_sent(
    client: httpx.AsyncClient, path: str
) -> None:
    for content in (b"x" * 1001, chunks(11)):
        response = await client.post(path, content=content)
        assert (response.status_code, error_code(response)) == (413, "VALIDATION_ERROR")
        assert "larger than 1000 bytes" in response.text
    assert (await client.get("/who")).status_code == 200


async def test_refusal_reaches_a_client_that_is_still_sending(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "MAX_DROP_S", 60.0)
    response = await client.post("/count", content=chunks(200, size=65_536))
    assert (response.status_code, error_code(response)) == (413, "VALIDATION_ERROR")
    response = await client.post("/count", content=b"x" * 10_000_000)
    assert (response.status_code, error_code(response)) == (413, "VALIDATION_ERROR")


async def test_a_declared_length_is_refused_before_the_body_is_sent(port: int) -> None:
    for length in (b"1001", b"9" * 18):
        head = b"POST /count HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: "
        head += length + b"\r\n\r\n"
        assert b"413 " in (await raw(port, head)).split(b"\r\n")[0]


@pytest.mark.slow
async def test_endless_body_is_cut_off(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /count HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(60):
            while True:
                writer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)
    writer.close()


@pytest.mark.slow
async def test_slow_body_is_refused_after_the_timeout() -> None:
    async with serving(bounded(build_app(), timeout_s=0.3)) as port, client_at(port) as client:
        response = await client.post("/count", content=chunks(40, size=1, pause_s=0.02))
        assert (response.status_code, error_code(response)) == (408, "TIMEOUT")
        assert "within 0.3 s" in response.text
        head = b"POST /parse HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{"
        assert b"408 " in (await raw(port, head)).split(b"\r\n")[0]


async def test_a_slow_answer_is_not_a_slow_body() -> None:
    app = FastAPI()

    @app.post("/slow")
    async def slow(request: Request) -> bool:
        await request.body()
        await asyncio.sleep(0.2)
        return await request.is_disconnected()

    # The body is available immediately, even on a slow machine.
    wire = httpx.ASGITransport(bounded(app, timeout_s=0.1))
    async with httpx.AsyncClient(transport=wire, base_url="http://test") as client:
        response = await client.post("/slow", content=b"x")
        assert (response.status_code, response.json()) == (200, False)


# -- ids -------------------------------------------------------------------------------------


async def test_a_request_id_is_taken_passed_on_and_echoed(client: httpx.AsyncClient) -> None:
    response = await client.get("/who", headers={"x-request-id": "run-7.step_12"})
    assert response.headers["x-request-id"] == response.json()["request_id"] == "run-7.step_12"


async def test_a_request_id_reaches_the_sessions_of_an_environment() -> None:
    seen: list[str] = []

    class Curious(CountingEnv):
        def step(self, action):  # type: ignore[no-untyped-def]
            seen.append(current_request_id())
            return super().step(action)

    async with run_gateway(factory=Curious) as (gateway, _), http_client(gateway) as http:
        await http.post(f"/envs/{NAME}/reset", json={})
        headers = {"x-request-id": "r-3"}
        step = await http.post(f"/envs/{NAME}/step", json={"action": {"add": 1}}, headers=headers)
        made = await http.post(f"/envs/{NAME}/step", json={"action": {"add": 1}})
    assert step.headers["x-request-id"] == "r-3"
    assert seen == ["r-3", made.headers["x-request-id"]]


async def test_a_request_without_a_good_id_is_given_one(client: httpx.AsyncClient) -> None:
    for headers in ({}, {"x-request-id": "a b"}, {"x-request-id": "a" * 129}):
        first = await client.get("/who", headers=headers)
        second = await client.get("/who", headers=headers)
        assert first.headers["x-request-id"] == first.json()["request_id"]
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        assert len(first.headers["x-request-id"]) == 32


async def test_refusals_and_sockets_carry_the_id_too(client: httpx.AsyncClient, port: int) -> None:
    refused = await client.post("/count", content=b"x" * 1001, headers={"x-request-id": "r1"})
    assert refused.headers["x-request-id"] == "r1"
    headers = {"x-request-id": "r2"}
    async with websockets.connect(
        f"ws://127.0.0.1:{port}/ws", additional_headers=headers
    ) as socket:
        assert await socket.recv() == "r2"
        assert socket.response is not None
        assert socket.response.headers["x-request-id"] == "r2"


Headers = st.lists(
    st.tuples(
        st.sampled_from([b"x-request-id", b"content-length", b"expect"]),
        st.binary(max_size=200) | st.from_regex(rb"[0-9a-f-]{0,60}", fullmatch=True),
    )
)


@given(Headers)
def test_any_headers_give_an_id_that_is_fit_for_logs(headers: list[tuple[bytes, bytes]]) -> None:
    made = choose_request_id(headers)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", made)


@given(Headers)
async def test_any_headers_are_served_or_refused(headers: list[tuple[bytes, bytes]]) -> None:
    sent: list[int] = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    async def send(message) -> None:  # type: ignore[no-untyped-def]
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    await bounded(app)({"type": "http", "path": "/", "headers": headers}, receive, send)
    assert sent in ([200], [413])

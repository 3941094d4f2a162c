"""Limits of request size and duration, and request ids, on the gateway's HTTP port."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import httpx
import pytest
import websockets
from fastapi import FastAPI, Request, Response, WebSocket
from hypothesis import given
from hypothesis import strategies as st

from ludus.env.limits import MAX_MESSAGE_BYTES
from ludus.env.security.tracing import get_request_id
from ludus.services.gateway.gateway import Gateway
from ludus.services.gateway.wires.middleware import RequestIdMiddleware, choose_request_id
from tests.gateway.gateways import NAME, CountingEnv, make_http_client, run_gateway
from tests.gateway.http_server import serve_app

STEP_PATH = f"/envs/{NAME}/step"
JSON_HEADERS = {"content-type": "application/json"}


def read_error_code(response: httpx.Response) -> str:
    assert response.headers["connection"] == "close"
    return response.json()["detail"]["code"]


async def make_chunks(num_bytes: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(0, num_bytes, size):
        yield b" " * size


async def start_request(
    gateway: Gateway, header_line: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, and send the head of a step request without its body."""
    host, port = gateway.http_address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = (
        f"POST {STEP_PATH} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        header_line,
    )
    writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    return reader, writer


# -- bodies ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_oversized_body_is_refused_after_the_upload() -> None:
    num_bytes = MAX_MESSAGE_BYTES + 1
    async with run_gateway() as (gateway, _), make_http_client(gateway) as http:
        for content in (b" " * num_bytes, make_chunks(num_bytes, size=2**20)):
            response = await http.post(STEP_PATH, content=content, headers=JSON_HEADERS)
            assert (response.status_code, read_error_code(response)) == (413, "VALIDATION_ERROR")
            assert f"at most {MAX_MESSAGE_BYTES} bytes" in response.text
        assert (await http.get("/healthz")).status_code == 200


@pytest.mark.slow
async def test_endless_body_closes_the_connection() -> None:
    async with run_gateway() as (gateway, _):
        _, writer = await start_request(gateway, "transfer-encoding: chunked")
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(60):
                while True:
                    writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                    await writer.drain()
        writer.close()


async def test_slow_body_is_refused_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.env.http.app.BODY_TIMEOUT_S", 0.3)
    async with run_gateway() as (gateway, _):
        reader, writer = await start_request(gateway, "content-length: 10")
        writer.write(b"{")
        async with asyncio.timeout(60):
            response = await reader.read()
        writer.close()
    assert response.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"TIMEOUT"' in response
    assert b"within 0.3 s" in response


# -- request ids -----------------------------------------------------------------------------


def build_app() -> RequestIdMiddleware:
    app = FastAPI()

    @app.get("/id")
    async def get_id(request: Request) -> dict[str, str]:
        return {"request_id": request.headers["x-request-id"]}

    @app.get("/refuse")
    async def refuse() -> Response:
        return Response(status_code=413)

    @app.websocket("/ws")
    async def send_id(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(websocket.headers["x-request-id"])
        await websocket.close()

    return RequestIdMiddleware(app)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serve_app(build_app()) as port:
        yield port


@pytest.fixture
async def client(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


async def test_request_id_is_forwarded_and_returned(client: httpx.AsyncClient) -> None:
    response = await client.get("/id", headers={"x-request-id": "run-7.step_12"})
    assert response.headers["x-request-id"] == response.json()["request_id"] == "run-7.step_12"


@pytest.mark.slow
async def test_environment_can_read_the_request_id() -> None:
    request_ids: list[str] = []

    class RequestIdEnv(CountingEnv):
        def step(self, action):  # type: ignore[no-untyped-def]
            request_ids.append(get_request_id())
            return super().step(action)

    async with run_gateway(factory=RequestIdEnv) as (gateway, _), make_http_client(gateway) as http:
        await http.post(f"/envs/{NAME}/reset", json={})
        headers = {"x-request-id": "r-3"}
        first_response = await http.post(
            f"/envs/{NAME}/step", json={"action": {"add": 1}}, headers=headers
        )
        second_response = await http.post(f"/envs/{NAME}/step", json={"action": {"add": 1}})
    assert first_response.headers["x-request-id"] == "r-3"
    assert request_ids == ["r-3", second_response.headers["x-request-id"]]


async def test_request_without_a_valid_id_gets_a_new_id(client: httpx.AsyncClient) -> None:
    for headers in ({}, {"x-request-id": "a b"}, {"x-request-id": "a" * 129}):
        first_response = await client.get("/id", headers=headers)
        second_response = await client.get("/id", headers=headers)
        assert first_response.headers["x-request-id"] == first_response.json()["request_id"]
        assert first_response.headers["x-request-id"] != second_response.headers["x-request-id"]
        assert len(first_response.headers["x-request-id"]) == 32


async def test_refusals_and_websockets_include_the_request_id(
    client: httpx.AsyncClient, port: int
) -> None:
    response = await client.get("/refuse", headers={"x-request-id": "r1"})
    assert response.headers["x-request-id"] == "r1"
    headers = {"x-request-id": "r2"}
    async with websockets.connect(
        f"ws://127.0.0.1:{port}/ws", additional_headers=headers
    ) as socket:
        assert await socket.recv() == "r2"
        assert socket.response is not None
        assert socket.response.headers["x-request-id"] == "r2"


HEADER_LISTS = st.lists(
    st.tuples(
        st.sampled_from([b"x-request-id", b"content-length", b"expect"]),
        st.binary(max_size=200) | st.from_regex(rb"[0-9a-f-]{0,60}", fullmatch=True),
    )
)


@pytest.mark.slow
@given(HEADER_LISTS)
def test_random_headers_yield_a_log_safe_request_id(headers: list[tuple[bytes, bytes]]) -> None:
    request_id = choose_request_id(headers)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", request_id)

"""JSON that is small on the wire and dear to parse does not stop a server or gateway."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest
import websockets

from ludus.env.client import AsyncEnvClient
from tests.attack.attacked import AttackedProcess, make_cases, serve_env, serve_gateway, watch

pytestmark = pytest.mark.slow

JSON_HEADERS = {"content-type": "application/json"}
BODIES: dict[str, Callable[[], bytes]] = {
    "million unknown fields": lambda: make_object(b'"%d":1', 1_000_000),
    "fields of the same name": lambda: b"{" + b'"a":1,' * 2_000_000 + b'"a":1}',
    "empty lists": lambda: b'{"a":[' + b"[]," * 5_000_000 + b"[]]}",
    "objects in objects": lambda: b'{"a":' * 3_000_000,
    "nulls with white space": lambda: b"[" + b"null ,\n" * 2_000_000 + b"null]",
    "strings of escapes": lambda: b"[" + b'"\\\\\\"",' * 2_000_000 + b'""]',
    "one string of escapes": lambda: b'{"a":"' + b"\\u0041" * 2_500_000 + b'"}',
    "one number": lambda: b'{"a":' + b"9" * 15_000_000 + b"}",
    "one fraction": lambda: b'{"a":0.' + b"9" * 15_000_000 + b"e-9}",
    "one key": lambda: b'{"' + b"k" * 15_000_000 + b'":1}',
    "white space": lambda: b" " * 15_000_000,
    "quotes": lambda: b'"' * 15_000_000,
    "maximum number of values": lambda: make_object(b'"%d":1', 65_000),
    "maximum number of long values": lambda: make_object(b'"%d":"' + b"x" * 200 + b'"', 60_000),
    "no UTF-8": lambda: b'{"a":"' + b"\xff" * 15_000_000 + b'"}',
}


def make_object(field: bytes, num_fields: int) -> bytes:
    return b"{" + b",".join(field % number for number in range(num_fields)) + b"}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedProcess]:
    with serve_env(tmp_path_factory.mktemp("server") / "empty") as attacked:
        yield attacked


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedProcess]:
    with serve_gateway(tmp_path_factory.mktemp("gateway") / "empty") as attacked:
        yield attacked


async def send_everywhere(url: str, body: bytes) -> None:
    """Send a body to every path, alone and as a part of a call; each gets a short reply.

    A body within the limits may be accepted, because step and reset ignore unknown fields.
    """
    calls = {
        "/step": [body, b'{"action":' + body + b"}"],
        "/reset": [body],
        "/mcp": [body, b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":' + body + b"}"],
    }
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=JSON_HEADERS) as client:
        for path, contents in calls.items():
            for content in contents:
                response = await client.post(path, content=content)
                assert response.status_code < 500, response.text[:1000]
                assert len(response.content) < 200_000
    async with websockets.connect(f"ws{url[4:]}/ws") as connection:
        for frame in (body, b'{"type":"step","data":' + body + b"}"):
            try:
                await connection.send(frame.decode(errors="replace"))
                assert len(await asyncio.wait_for(connection.recv(), 60)) < 200_000
            except websockets.ConnectionClosedError:
                return


@pytest.mark.parametrize("make_body", make_cases(BODIES))
async def test_body_does_not_stop_other_sessions(
    server: AttackedProcess, gateway: AttackedProcess, make_body: Callable[[], bytes]
) -> None:
    body = make_body()
    for attacked, url in ((server, server.http), (gateway, f"{gateway.http}/envs/hostile")):
        async with await AsyncEnvClient.connect(attacked.grpc) as client:
            session, _ = await client.open(seed=1)

            async def step(session=session) -> None:
                await session.step({"code": ""})

            async with watch(step):
                await send_everywhere(url, body)
    assert "was lost" not in gateway.read_log()


@pytest.mark.parametrize("num_fragments", make_cases({"many": 10_000, "a million": 1_000_000}))
def test_message_in_fragments_is_refused(server: AttackedProcess, num_fragments: int) -> None:
    head = (
        b"GET /ws HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    fragment = b"\x00\x81\0\0\0\0["
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head)
        assert b"101" in connection.recv(1000)
        with pytest.raises(OSError):
            connection.sendall(b"\x01\x81\0\0\0\0[" + fragment * num_fragments)
            while connection.recv(1000):
                connection.sendall(fragment)
            raise ConnectionError

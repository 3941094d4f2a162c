"""Size and time limits of HTTP request heads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import websockets
from fastapi import FastAPI, Request, WebSocket

from ludus.env.asgi.uvicorn_protocols import BoundedHttpProtocol
from tests.gateway.http_server import serve_app


class SmallHeadProtocol(BoundedHttpProtocol):
    """An HTTP protocol with a low size limit for request heads."""

    max_head_bytes = 10_000
    head_timeout_s = 60.0


def build_app() -> FastAPI:
    app = FastAPI()

    @app.post("/count")
    async def count(request: Request) -> int:
        return len(await request.body())

    @app.get("/")
    async def get_header_length(request: Request) -> int:
        return len(request.headers.get("x-long", ""))

    @app.websocket("/ws")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        while True:
            await websocket.send_text(await websocket.receive_text())

    return app


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serve_app(build_app(), http=SmallHeadProtocol) as port:
        yield port


@pytest.fixture
def shorten_head_timeout(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that sets the timeout of later request heads to 0.1 s."""
    return lambda: monkeypatch.setattr(SmallHeadProtocol, "head_timeout_s", 0.1)


class RawConnection:
    """A TCP connection that sends raw bytes and reads JSON responses."""

    @classmethod
    async def connect(cls, port: int) -> RawConnection:
        self = cls()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        return self

    async def send(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def read_response(self) -> tuple[int, Any]:
        async with asyncio.timeout(60):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await self.reader.readexactly(length)
        return int(head.split()[1]), json.loads(body)

    async def is_closed(self) -> bool:
        async with asyncio.timeout(60):
            return await self.reader.read() == b""


async def test_long_head_within_the_limit_is_served(port: int) -> None:
    connection = await RawConnection.connect(port)
    for _ in range(3):
        await connection.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"y" * 4000)
        await connection.send(b"y" * 4000 + b"\r\n\r\n")
        assert await connection.read_response() == (200, 8000)


@pytest.mark.parametrize("head_start", [b"GET /", b"GET / HTTP/1.1\r\nhost: localhost\r\nx-long: "])
async def test_endless_line_is_refused(port: int, head_start: bytes) -> None:
    connection = await RawConnection.connect(port)
    await connection.send(head_start + b"y" * 11_000)
    status, body = await connection.read_response()
    assert (status, body["detail"]["code"]) == (431, "VALIDATION_ERROR")
    assert await connection.is_closed()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"y" * 10_500,
        b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"\r\n".join(1000 * [b"x-long: y"]),
        b"GET /?" + b"y" * 10_500 + b" HTTP/1.1\r\nhost: localhost",
        b"GET /ws HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nx: "
        + b"y"
        * 10_500,
    ],
    ids=["header", "headers", "path", "websocket"],
)
@pytest.mark.parametrize("earlier_request", [b"", b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"])
async def test_long_head_in_one_piece_is_refused(
    port: int, head: bytes, earlier_request: bytes
) -> None:
    connection = await RawConnection.connect(port)
    await connection.send(earlier_request + head + b"\r\n\r\n")
    status, body = await connection.read_response()
    assert (status, body["detail"]["code"]) == (431, "VALIDATION_ERROR")
    assert await connection.is_closed()


async def test_head_after_a_long_body_in_one_piece_is_served(port: int) -> None:
    connection = await RawConnection.connect(port)
    request = b"POST /count HTTP/1.1\r\nhost: localhost\r\ncontent-length: 30000\r\n\r\n"
    next_head = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
    await connection.send(request + b"x" * 30_000 + next_head)
    assert await connection.read_response() == (200, 30_000)
    await connection.send(b"\r\n")
    assert await connection.read_response() == (200, 0)


async def test_endless_headers_are_refused(port: int) -> None:
    connection = await RawConnection.connect(port)
    await connection.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
    response_task = asyncio.create_task(connection.read_response())
    num_headers = 0
    while not response_task.done():
        connection.writer.write(b"x-%d: y\r\n" % num_headers)
        num_headers += 1
        await asyncio.sleep(0)
    assert (await response_task)[0] == 431
    assert num_headers < 50_000


async def test_slow_or_missing_head_is_refused(
    port: int, shorten_head_timeout: Callable[[], None]
) -> None:
    shorten_head_timeout()
    silent_connection, slow_connection = (
        await RawConnection.connect(port),
        await RawConnection.connect(port),
    )

    async def send_slowly() -> None:
        await slow_connection.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nx-a: ")
        while True:
            await slow_connection.send(b"1")
            await asyncio.sleep(0.05)

    task = asyncio.create_task(send_slowly())
    for connection in (silent_connection, slow_connection):
        status, body = await connection.read_response()
        assert (status, body["detail"]["code"]) == (408, "TIMEOUT")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_second_head_on_a_connection_is_limited(
    port: int, shorten_head_timeout: Callable[[], None]
) -> None:
    connection = await RawConnection.connect(port)
    await connection.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await connection.read_response())[0] == 200
    shorten_head_timeout()
    await connection.send(b"GET / HT")
    assert (await connection.read_response())[0] == 408


@pytest.mark.slow
async def test_head_timeout_does_not_apply_to_bodies_and_sockets(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SmallHeadProtocol, "head_timeout_s", 1.0)
    connection = await RawConnection.connect(port)
    await connection.send(
        b"POST /count HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20000\r\n\r\n"
    )
    async with websockets.connect(f"ws://127.0.0.1:{port}/ws") as socket:
        await asyncio.sleep(1.5)
        await connection.send(b"x" * 20_000)
        assert await connection.read_response() == (200, 20_000)
        await socket.send("y" * 50_000)
        assert len(await socket.recv()) == 50_000


CHUNKED_HEAD = b"POST /count HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_trailers_are_dropped(port: int) -> None:
    connection = await RawConnection.connect(port)
    trailers = b"".join(b"x-%d: y\r\n" % number for number in range(800))
    for _ in range(3):
        await connection.send(CHUNKED_HEAD + b"2\r\nxx\r\n0\r\n" + trailers + b"\r\n")
        assert await connection.read_response() == (200, 2)


@pytest.mark.parametrize(
    "rest",
    [
        b"2\r\nxx\r\n0\r\nx: " + b"y" * 12_000,
        b"2\r\nxx\r\n0\r\n" + b"x: y\r\n" * 2500,
        b"2;" + b"y" * 12_000,
        b"0" * 12_000,
    ],
    ids=["trailer", "trailers", "extension", "size"],
)
async def test_long_marks_of_a_body_are_refused(port: int, rest: bytes) -> None:
    connection = await RawConnection.connect(port)
    await connection.send(CHUNKED_HEAD + rest)
    status, body = await connection.read_response()
    assert (status, body["detail"]["code"]) == (431, "VALIDATION_ERROR")
    assert await connection.is_closed()


async def test_short_marks_of_many_chunks_are_allowed(port: int) -> None:
    connection = await RawConnection.connect(port)
    await connection.send(CHUNKED_HEAD + b"1;a=b\r\nx\r\n" * 5000 + b"0\r\n\r\n")
    assert await connection.read_response() == (200, 5000)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b" " * 12_500 + b"HTTP/1.1\r\nhost: localhost",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx:" + b" " * 12_500,
        b"\r\n" * 6250 + b"GET / HTTP/1.1\r\nhost: localhost",
    ],
    ids=["line", "header", "empty lines"],
)
@pytest.mark.parametrize("earlier_request", [b"", b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"])
async def test_white_space_is_a_part_of_a_head(
    port: int, head: bytes, earlier_request: bytes
) -> None:
    connection = await RawConnection.connect(port)
    await connection.send(earlier_request + head + b"\r\n\r\n")
    status, body = await connection.read_response()
    assert (status, body["detail"]["code"]) == (431, "VALIDATION_ERROR")
    assert await connection.is_closed()

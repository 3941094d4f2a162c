"""The client's WebSocket: delivered replies, and replies that must be read."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from ludus.env.transports.websocket import CallConnection

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def open_connection(answer):
    """Open a connection to a server that sends an optional first message, and replies."""
    async with serve(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        address = f"ws://127.0.0.1:{port}"
        async with connect(address, create_connection=CallConnection, compression=None) as socket:
            yield socket


async def receive_reply(socket: CallConnection, message: bytes) -> str | None:
    reply = asyncio.get_running_loop().create_future()
    assert socket.send_request(message, reply.set_result)
    return await asyncio.wait_for(reply, 5)


async def test_each_reply_goes_to_the_call_that_asked_for_it() -> None:
    async def echo(socket) -> None:
        async for text in socket:
            await socket.send(text)

    async with open_connection(echo) as socket:
        assert [await receive_reply(socket, text) for text in (b"one", "zwölf".encode())] == [
            "one",
            "zwölf",
        ]


@pytest.mark.parametrize("reply", [["in ", "fragments"], b"binary"])
async def test_a_reply_that_is_no_whole_text_is_left_to_be_read(reply) -> None:
    async def answer(socket) -> None:
        async for _ in socket:
            await socket.send(reply)

    async with open_connection(answer) as socket:
        assert await receive_reply(socket, b"x") is None
        assert await socket.recv() == ("in fragments" if isinstance(reply, list) else reply)


async def test_an_unrequested_frame_is_no_reply() -> None:
    async def refuse(socket) -> None:
        await socket.send("full")
        await socket.recv()

    async with open_connection(refuse) as socket:
        async with asyncio.timeout(5):
            while not socket.has_unread:
                await asyncio.sleep(0.001)
        assert not socket.send_request(b"x", pytest.fail)
        assert await socket.recv() == "full"


async def test_text_that_is_none_ends_the_connection() -> None:
    async def mumble(socket) -> None:
        await socket.recv()
        await socket.send(b"\xff", text=True)
        await socket.wait_closed()

    async with open_connection(mumble) as socket:
        assert await receive_reply(socket, b"x") is None
        with pytest.raises(ConnectionClosed, match="1007"):
            await socket.recv()


async def test_a_connection_that_breaks_tells_who_waits_and_takes_no_more() -> None:
    async def leave(socket) -> None:
        await socket.recv()
        socket.transport.abort()

    async with open_connection(leave) as socket:
        assert await receive_reply(socket, b"x") is None
        assert not socket.send_request(b"y", pytest.fail)
        with pytest.raises(ConnectionClosed):
            await socket.recv()

"""The client's side of OpenEnv's WebSocket: one connection for one session.

    request --> frame --> socket      socket --> parser --> frame --+--> on_reply
                                                                    |
                                   fragments, unexpected frames ----+--> send and recv

The direct path delivers replies without a task, a lock or a queue. It is used only while no frame
waits to be read, so that an unexpected frame is never taken for a reply. The module uses names of
websockets that may change with its version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import DATA_OPCODES, Frame, Opcode
from websockets.protocol import Event, State

from ludus.env.encoding import plain_json
from ludus.env.limits import MAX_MESSAGE_BYTES, MAX_REPLY_BYTES
from ludus.env.security.tracing import trace_headers
from ludus.env.transports.address import RemoteServer, ServerAddress
from ludus.env.transports.http import refusal, unreachable
from ludus.env.types import JsonObject
from ludus.proto.errors import InvalidCallError, SessionLostError, error_from_wire

_CLOSE_TIMEOUT_S = 2.0
OnReply = Callable[[str | None], Any]
"""Callback for one reply. None means that `recv` returns the reply or raises the reason why there
is none. Must not raise."""


class CallConnection(ClientConnection):
    """A connection on which each message gets one reply before the next message is sent."""

    _on_reply: OnReply | None = None
    has_unread = False
    """True after the first frame that `recv` has to read."""

    def send_request(self, message: bytes, on_reply: OnReply) -> bool:
        """Send a text and return True if its reply will be passed to `on_reply`.

        False means that the caller must use `send` and `recv`: a frame waits to be read or
        written, or the connection has ended and they raise the reason.
        """
        if self.has_unread or self.paused or self.protocol.state is not State.OPEN:
            return False
        self._on_reply = on_reply
        self.protocol.send_text(message)
        try:
            self.send_data()
        except (OSError, RuntimeError):  # the event loop decides which of the two
            self.transport.abort()
        return True

    def process_event(self, event: Event) -> None:
        """Pass a reply to its callback, or leave the frame to `recv`."""
        if not isinstance(event, Frame) or event.opcode not in DATA_OPCODES:
            super().process_event(event)
            return
        on_reply, self._on_reply = self._on_reply, None
        reply = None if on_reply is None else _complete_text(event)
        if reply is None:
            self.has_unread = True
            super().process_event(event)
        if on_reply is not None:
            on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the caller that waits for a reply."""
        super().connection_lost(exc)
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            on_reply(None)


def _complete_text(frame: Frame) -> str | None:
    """Return the text of a frame that is a complete message, or None if `recv` must handle it."""
    if not frame.fin or frame.opcode is not Opcode.TEXT:
        return None
    try:
        return str(frame.data, "utf-8")
    except UnicodeDecodeError:
        return None


class SocketChannel:
    """The calls of a session on its own connection, which ends the session when it is closed."""

    def __init__(self, socket: CallConnection, address: ServerAddress) -> None:
        self._socket = socket
        self._address = address

    @classmethod
    async def open(cls, server: RemoteServer, query: str) -> SocketChannel:
        """Open a connection to the server's `/ws`.

        Args:
            query: part of the URL after `/ws`.
        """
        address, options = server.address, server.options
        headers = {"authorization": server.authorization} if server.authorization else {}
        tls: JsonObject = {"ssl": server.ssl_context()} if address.is_secure else {}
        if tls and options.server_name:
            tls["server_hostname"] = options.server_name
        try:
            socket = await connect(
                f"{address.ws_base}/ws{query}",
                additional_headers={**headers, **trace_headers()},
                compression=None,
                max_size=MAX_REPLY_BYTES,
                open_timeout=options.timeout_s,
                close_timeout=_CLOSE_TIMEOUT_S,
                proxy=None,
                create_connection=CallConnection,
                **tls,
            )
        except InvalidStatus as error:
            response = error.response
            wait, body = response.headers.get("retry-after"), bytes(response.body or b"")
            raise refusal(address, response.status_code, wait, body) from None
        except (OSError, InvalidHandshake) as error:
            raise unreachable(address, error) from error
        assert isinstance(socket, CallConnection), "create_connection made it"
        return cls(socket, address)

    async def call(self, message: JsonObject) -> JsonObject:
        """Send a message and return the data of the reply."""
        text = plain_json(message, "a call")
        if len(text) > MAX_MESSAGE_BYTES:
            raise InvalidCallError(
                f"a call to {self._address} must have at most {MAX_MESSAGE_BYTES} bytes,"
                f" got {len(text)}; send less in one call"
            )
        try:
            reply = orjson.loads(await self._exchange(text))
        except ConnectionClosed as error:
            raise SessionLostError(
                f"session lost: the connection to {self._address} broke: {error}; open a new one"
            ) from None
        content: JsonObject = reply["data"]
        if reply["type"] == "error":
            retry_after_s = content.get("retry_after_s", 0.0)
            raise error_from_wire(content["code"], content["message"], retry_after_s)
        return content

    async def close(self) -> None:
        """Close the connection."""
        await self._socket.close()

    async def _exchange(self, message: bytes) -> str | bytes:
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        if self._socket.send_request(message, partial(_settle, future)):
            reply = await future
            if reply is not None:
                return reply
        else:
            # A server that refuses the session reports the reason in a frame that waits to be read.
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(message, text=True)
        return await self._socket.recv()


def _settle(future: asyncio.Future[str | None], reply: str | None) -> None:
    if not future.done():
        future.set_result(reply)

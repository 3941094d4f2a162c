"""The client's side of OpenEnv's WebSocket: one connection for one session."""

from __future__ import annotations

import contextlib

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from ludus.env.encoding import plain_json
from ludus.env.limits import MAX_MESSAGE_BYTES, MAX_REPLY_BYTES
from ludus.env.security.tracing import trace_headers
from ludus.env.transports.address import RemoteServer, ServerAddress
from ludus.env.transports.http import refusal, unreachable
from ludus.env.types import JsonObject
from ludus.proto.errors import InvalidCallError, SessionLostError, error_from_wire

_CLOSE_TIMEOUT_S = 2.0


class SocketChannel:
    """The calls of a session on its own connection, which ends the session when it is closed."""

    def __init__(self, socket: ClientConnection, address: ServerAddress) -> None:
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
                **tls,
            )
        except InvalidStatus as error:
            response = error.response
            wait, body = response.headers.get("retry-after"), bytes(response.body or b"")
            raise refusal(address, response.status_code, wait, body) from None
        except (OSError, InvalidHandshake) as error:
            raise unreachable(address, error) from error
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
            # A server that refuses the session reports the reason in a frame that waits to be read.
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(text, text=True)
            reply = orjson.loads(await self._socket.recv())
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

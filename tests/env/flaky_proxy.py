"""A TCP proxy that delays, cuts, blocks and half-closes connections.

It can also add TLS in front of a server without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from ssl import SSLContext


class FlakyProxy:
    """A proxy between a client and a server: `async with FlakyProxy(server.address) as proxy`."""

    def __init__(self, upstream: str, ssl: SSLContext | None = None) -> None:
        self._ssl = ssl
        scheme, _, authority = upstream.partition("://")
        self._scheme = scheme
        self._host, _, port = authority.rpartition(":")
        self._port = int(port)
        self.address = ""
        self.delay_s: Callable[[], float] = lambda: 0.0
        """Function that returns the delay of the next chunk to the client, in seconds."""
        self.refuses_connections = False
        """True if new connections are closed immediately."""
        self.num_connections = 0
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FlakyProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._ssl)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"{self._scheme}://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        self.cut()

    def set_upstream(self, upstream: str) -> None:
        """Forward new connections to another server."""
        self._port = int(upstream.rpartition(":")[2])

    def cut(self) -> None:
        """Abort every connection, as if the server had been killed."""
        for link in list(self._links):
            link.abort()

    def blackhole(self) -> None:
        """Stop forwarding data, but keep the existing connections open."""
        for link in self._links:
            link.discards_data = True

    def blackhole_replies(self) -> None:
        """Stop forwarding data of the server, but keep the existing connections open."""
        for link in self._links:
            link.discards_replies = True

    def half_close(self) -> None:
        """Close the direction to the client, and discard data from the client."""
        for link in self._links:
            link.half_close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self.refuses_connections:
            writer.transport.abort()
            return
        try:
            upstream = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(self, (reader, writer), upstream)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)


class _Link:
    """One proxied connection."""

    def __init__(
        self,
        proxy: FlakyProxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._client_reader, self._client_writer = client
        self._server_reader, self._server_writer = server
        self.discards_data = False
        self.discards_replies = False

    async def run(self) -> None:
        pump_tasks = [
            asyncio.create_task(
                self._pump(self._client_reader, self._server_writer, is_delayed=False)
            ),
            asyncio.create_task(
                self._pump(self._server_reader, self._client_writer, is_delayed=True)
            ),
        ]
        await asyncio.wait(pump_tasks, return_when=asyncio.FIRST_COMPLETED)
        self.abort()
        await asyncio.wait(pump_tasks)

    def abort(self) -> None:
        self._client_writer.transport.abort()
        self._server_writer.transport.abort()

    def half_close(self) -> None:
        self.discards_data = True
        with contextlib.suppress(OSError):
            self._client_writer.write_eof()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_delayed: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(65536):
                if is_delayed and (delay_s := self._proxy.delay_s()):
                    await asyncio.sleep(delay_s)
                if not self.discards_data and not (is_delayed and self.discards_replies):
                    sink.write(chunk)
                    await sink.drain()

"""The gateway's connection to one environment server, with automatic reconnection.

    calls --call stream--> server
    _run_forever(): connect, describe --> poll Status every second --> stream broke --> connect ...

A call waits at most `retry_within_s` for a broken connection, then for its reply. A server that
responds with a different id than before has restarted, and its earlier sessions are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc

from ludus.env.backoff import doubling
from ludus.env.grpc.call_stream import CallStream, ConnectionLostError
from ludus.env.grpc.server_port import ServerPort, open_channel
from ludus.env.limits import MAX_GATEWAY_CALL_BYTES
from ludus.env.types import EnvironmentDescription
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import EnvError, SessionLostError, UnavailableError
from ludus.services.gateway.config import ServersSection
from ludus.services.gateway.fleet.sources import ServerEndpoint

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_REFUSAL_POLL_DELAY_S = 0.1
"""Delay from a server's refusal to the next poll, because many refusals may come together."""
_KEEPALIVE_S = 10.0
_KEEPALIVE_TIMEOUT_S = 5.0


class ServerLink:
    """The connection to one server, its load and its reserved capacity.

    Args:
        on_change: called when the server starts or stops accepting sessions, or frees capacity.
        pause_s: returns the seconds until the next poll.
    """

    def __init__(
        self,
        endpoint: ServerEndpoint,
        options: ServersSection,
        on_change: Callable[[], None],
        pause_s: Callable[[], float],
    ) -> None:
        self.endpoint = endpoint
        self.description: EnvironmentDescription | None = None
        """The server's latest description; None until it was reached."""
        self.server_id = endpoint.server_id
        self.first_attempt = asyncio.Event()
        """Set when the first attempt to connect has succeeded or failed."""
        self.refusal = ""
        """Reason for placing no sessions here until the next poll; empty if there is none."""
        self.last_refusal = ""
        """Reason why the server refused this gateway's last session; empty if it accepted it."""
        self.is_draining = False
        self.connected_s = 0.0
        """Event-loop time at which the latest connection was made."""
        self.broken_s = 0.0
        """Event-loop time at which a connection last broke."""
        self.max_sessions = 0
        self.num_placed = 0
        """Total number of sessions that this gateway reserved capacity for."""
        self.num_ended = 0
        """Number of sessions among `num_placed` that ended or were never opened."""
        self.last_used_s = asyncio.get_running_loop().time()
        """Event-loop time of the last poll that reported a session, or of the link's creation."""
        self.unused_s = 0.0
        """Seconds for which polls have reported no session; updated only by successful polls."""
        self._unused_since_s: float | None = None
        self._num_polls = 0
        self._num_polled = 0
        self._num_since_poll = 0
        """Sessions opened minus sessions ended after the latest successful poll was sent."""
        self._num_opening = 0
        self._num_uncertain = 0
        """Opens and closes that overlapped with the latest poll, which may not count them."""
        self._is_polling = False
        self._is_full = False
        self._is_silent = False
        self._options = options
        self._on_change = on_change
        self._pause_s = pause_s
        self._close_reason = ""
        self._stream: CallStream | None = None
        self._connected = asyncio.Event()
        self._broken = asyncio.Event()
        self._poll_soon = asyncio.Event()
        """Event that ends the pause before the next poll."""
        self._port = _make_port(endpoint, options)
        self._task = asyncio.create_task(self._run_forever())

    # -- placement ---------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """True while the connection works."""
        return self._connected.is_set()

    @property
    def accepts_sessions(self) -> bool:
        """True when new sessions may be placed here."""
        endpoint = self.endpoint
        return (
            self.is_connected
            and endpoint.is_ready
            and not (endpoint.is_terminating or self.is_draining or self._is_silent)
            and not self.refusal
        )

    @property
    def num_sessions(self) -> int:
        """Estimated number of sessions on the server, including those being opened.

        A server counts a session as soon as its open arrives, so a poll is assumed to count the
        sessions whose open was sent before it. `num_free` does not rely on this.
        """
        num_estimated = max(self._num_polled + self._num_since_poll, 0)
        return min(num_estimated, max(self.max_sessions, self._num_polled))

    @property
    def num_free(self) -> int:
        """Number of sessions that may be placed here now."""
        if self._is_full or not self.accepts_sessions:
            return 0
        num_free = max(self.max_sessions - self.num_sessions - self._num_uncertain, 0)
        max_opens = self.endpoint.max_opens
        if max_opens is None:
            return num_free
        return min(num_free, max(max_opens - self.num_placed, 0))

    @property
    def is_used_up(self) -> bool:
        """True when sessions were placed here and all of them have ended."""
        return 0 < self.num_placed <= self.num_ended

    def explain_loss(self, server_id: str, linger_s: float) -> str:
        """Return the reason why the sessions of `server_id` are lost; empty while they may exist.

        Args:
            linger_s: seconds that the sessions survive a broken connection.
        """
        if self._close_reason:
            return self._close_reason
        address = self.endpoint.grpc_address
        if self.is_connected:
            is_same = self.server_id == server_id
            return "" if is_same else f"server {server_id} at {address} has restarted"
        silent_s = asyncio.get_running_loop().time() - self.broken_s
        if silent_s <= linger_s:
            return ""
        return (
            f"server {server_id} at {address} was not reachable for longer than their linger time"
        )

    def reserve(self, num_sessions: int) -> int:
        """Reserve capacity until `confirm` or `cancel`; return the value that `cancel` needs."""
        self._num_since_poll += num_sessions
        self._num_opening += num_sessions
        self.num_placed += num_sessions
        return self._num_polls

    def confirm(self, num_sessions: int) -> None:
        """Record that sessions were opened in reserved capacity."""
        self._num_opening -= num_sessions
        self.last_refusal = ""

    def cancel(self, num_sessions: int, num_polls: int) -> None:
        """Free reserved capacity that was not used."""
        self._num_opening -= num_sessions
        self.num_ended += num_sessions
        if num_polls == self._num_polls:
            self._num_since_poll -= num_sessions
        else:  # a later poll has already corrected the count
            self._num_uncertain = max(self._num_uncertain - num_sessions, 0)

    def count_ended(self, num_sessions: int) -> None:
        """Count sessions that ended after the last poll."""
        self._num_since_poll -= num_sessions
        if self._is_polling:
            self._num_uncertain += num_sessions
        self.num_ended += num_sessions
        self._is_full = False

    def mark_full(self) -> None:
        """Place no sessions here until the next poll, which follows soon: the server was full."""
        self._is_full = True
        self._poll_soon.set()

    def mark_refused(self, reason: str) -> None:
        """Place no sessions here until the next poll: the server refused one."""
        self.refusal = self.last_refusal = reason

    # -- calls -------------------------------------------------------------------------

    def live_stream(self, server_id: str) -> CallStream | None:
        """Return the stream to that server, or None if a call must wait for the connection."""
        if self._connected.is_set() and self.server_id == server_id:
            return self._stream
        return None

    async def call(
        self,
        server_id: str,
        write: Callable[[pb.Call], None],
        *,
        is_repeatable: bool = False,
    ) -> pb.Reply:
        """Send a call and return the server's reply.

        Args:
            server_id: the server that must reply; only this server has the session.
            write: fills the call; runs twice if a repeatable call is repeated.
            is_repeatable: whether the call may be sent again if the connection breaks.

        Raises:
            SessionLostError: the server restarted or is gone, or the connection broke during a
                call that must not be repeated.
            UnavailableError: the server could not be reached in time.
        """
        stream = await self._wait_for_stream(server_id)
        try:
            return await stream.begin(write)
        except ConnectionLostError:
            if not is_repeatable:
                raise
        stream = await self._wait_for_stream(server_id)
        return await stream.begin(write)

    def send_close(self, session_id: str) -> None:
        """Close a session without waiting; if the stream is broken, its linger time ends it."""
        stream = self._stream
        if stream is not None and stream.broken is None:
            stream.send_close(session_id)

    def send_detach(self, session_id: str) -> None:
        """Detach a session without waiting, so that it ends after its linger time."""
        stream = self._stream
        if stream is not None and stream.broken is None:

            def fill(call: pb.Call) -> None:
                call.detach.session_id = session_id

            stream.ignore_failure(stream.begin(fill))

    async def close(self, reason: str) -> None:
        """Close the connection; the server keeps its sessions for their linger time."""
        self._close_reason = reason
        self._connected.set()  # wakes waiting calls, which then see that the link is closed
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._stream is not None:
            await self._stream.close()
        await self._port.close()

    # -- the connection ----------------------------------------------------------------

    async def _run_forever(self) -> None:
        loop = asyncio.get_running_loop()
        pauses = doubling(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        while True:
            try:
                await self.connect()
            except EnvError as error:
                _log.debug("server %s: %s", self.endpoint.grpc_address, error)
                self.first_attempt.set()
            else:
                self.first_attempt.set()
                self._on_change()
                connected_s = loop.time()
                await self._poll_until_broken()
                self._on_change()
                if loop.time() - connected_s > _MAX_BACKOFF_S:
                    pauses = doubling(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
                    continue
            # The server is unavailable or breaks connections: do not flood it with attempts.
            await asyncio.sleep(next(pauses))

    async def connect(self) -> None:
        """Open a stream and read the server's description and load."""
        self._broken.clear()
        self.last_refusal = ""
        duplex = await self._port.connect(self._options.unreachable_after_s)
        try:
            description = await self._port.describe()
            await self.poll()
        except BaseException:
            duplex.cancel()
            raise
        self.description = description
        self.server_id = description.server_id
        self._stream = CallStream(
            duplex,
            self.endpoint.grpc_address,
            timeout_s=self._options.call_timeout_s,
            max_call_bytes=MAX_GATEWAY_CALL_BYTES,
            on_broken=self._handle_broken,
        )
        self.connected_s = asyncio.get_running_loop().time()
        self._connected.set()

    async def _poll_until_broken(self) -> None:
        """Poll the load until the stream breaks."""
        while not self._broken.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poll_soon.wait(), self._pause_s())
                self._poll_soon.clear()
                await asyncio.wait_for(self._broken.wait(), _REFUSAL_POLL_DELAY_S)
            if not self._broken.is_set():
                await self._poll_or_mark_silent()

    async def _poll_or_mark_silent(self) -> None:
        try:
            await self.poll()
        except EnvError as error:
            self._is_silent = True
            _log.warning("server %s: %s", self.endpoint.grpc_address, error)
            return
        self._is_silent = False
        self._on_change()

    async def poll(self) -> None:
        """Read the server's load."""
        self._num_polls += 1
        self._num_uncertain, num_before = self._num_opening, self._num_since_poll
        self._is_polling = True
        try:
            status = await self._port.status()
        finally:
            self._is_polling = False
        self._num_polled = status.num_sessions
        self._record_use(status.num_sessions > 0)
        self._num_since_poll -= num_before
        self.max_sessions = status.max_sessions
        self.is_draining = status.is_draining
        self._is_full = False
        self.refusal = ""

    def _record_use(self, is_used: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        if is_used:
            self.last_used_s, self._unused_since_s = now_s, None
        elif self._unused_since_s is None:
            self._unused_since_s = now_s
        self.unused_s = 0.0 if self._unused_since_s is None else now_s - self._unused_since_s

    async def _wait_for_stream(self, server_id: str) -> CallStream:
        """Wait for the stream and return it if the server still has the id `server_id`."""
        try:
            async with asyncio.timeout(self._options.retry_within_s):
                await self._connected.wait()
        except TimeoutError:
            raise UnavailableError(
                f"cannot reach server {server_id} at {self.endpoint.grpc_address} within"
                f" {self._options.retry_within_s:g} s; try again later"
            ) from None
        if self._close_reason:
            raise SessionLostError(f"session lost: {self._close_reason}; open a new one")
        if self.server_id != server_id:
            raise SessionLostError(
                f"session lost: its server {server_id} restarted (new id {self.server_id});"
                " open a new one"
            )
        assert self._stream is not None, "the link is connected"
        return self._stream

    def _handle_broken(self, reason: str) -> None:
        if not self._close_reason:
            _log.info("server %s: %s", self.endpoint.grpc_address, reason)
            self._connected.clear()
            self.broken_s = asyncio.get_running_loop().time()
        self._broken.set()
        self._poll_soon.set()


def _make_port(endpoint: ServerEndpoint, options: ServersSection) -> ServerPort:
    metadata = (("authorization", options.authorization),) if options.authorization else ()
    scheme, _, target = endpoint.grpc_address.rstrip("/").rpartition("://")
    credentials = options.credentials
    if credentials is None and scheme == "grpcs":
        credentials = grpc.ssl_channel_credentials()
    channel = open_channel(
        target,
        credentials,
        options.server_name,
        keepalive_s=_KEEPALIVE_S,
        keepalive_timeout_s=_KEEPALIVE_TIMEOUT_S,
        options=(("grpc.http2.max_pings_without_data", 0),),
    )
    return ServerPort(channel, endpoint.grpc_address, metadata, options.unreachable_after_s)

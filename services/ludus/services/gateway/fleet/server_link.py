"""The gateway's connection to one environment server, with automatic reconnection.

    calls --call stream--> server
    connect, describe --> poll Status every second --> the stream breaks --> connect ...

If the connection is broken, a call first waits at most `retry_within_s` for a new one. A server
that responds with another id than before has restarted, and its earlier sessions are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

import grpc

from ludus.env.backoff import generate_pauses
from ludus.env.grpc.call_stream import CallStream, ConnectionLostError
from ludus.env.grpc.server_port import GrpcClient, open_channel
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
"""Seconds from a refusal to the next poll, so that one poll follows many refusals."""
_KEEPALIVE_S = 10.0
_KEEPALIVE_TIMEOUT_S = 5.0


class ServerLink:
    """The connection to one server, its load and its reserved capacity.

    Args:
        on_change: called when the server starts or stops accepting sessions, or frees capacity.
        choose_pause_s: returns the seconds until the next poll.
    """

    def __init__(
        self,
        endpoint: ServerEndpoint,
        options: ServersSection,
        on_change: Callable[[], None],
        choose_pause_s: Callable[[], float],
    ) -> None:
        self.endpoint = endpoint
        self.description: EnvironmentDescription | None = None
        """The server's latest description; None before the first connection."""
        self.server_id = endpoint.server_id
        self.first_attempt_event = asyncio.Event()
        """Event that is set when the first attempt to connect has succeeded or failed."""
        self.refusal = ""
        """Reason why the server gets no new sessions until the next poll, or ''."""
        self.last_refusal = ""
        """Reason why the server refused this gateway's latest session, or '' if it accepted it."""
        self.is_draining = False
        self.connected_at_s = 0.0
        """Event-loop time at which the latest connection was made."""
        self.broken_at_s = 0.0
        """Event-loop time at which a connection last broke."""
        self.max_sessions = 0
        self.num_placed_sessions = 0
        """Total number of sessions for which this gateway has reserved capacity."""
        self.num_ended_sessions = 0
        """Number of sessions in `num_placed_sessions` that have ended or were never opened."""
        self.last_used_s = asyncio.get_running_loop().time()
        """Event-loop time of the last poll that reported a session, or of the link's creation."""
        self.unused_s = 0.0
        """Seconds for which polls have reported no session; updated only by successful polls."""
        self._unused_since_s: float | None = None
        self._num_polls = 0
        self._num_polled_sessions = 0
        self._num_change_since_poll = 0
        """Number of sessions opened minus sessions ended since the latest successful poll."""
        self._num_opening_sessions = 0
        self._num_uncertain_sessions = 0
        """Number of sessions opened or ended during the latest poll, which may have missed them."""
        self._is_polling = False
        self._is_full = False
        self._is_silent = False
        self._options = options
        self._on_change = on_change
        self._choose_pause_s = choose_pause_s
        self._close_reason = ""
        self._stream: CallStream | None = None
        self._connected_event = asyncio.Event()
        self._broken_event = asyncio.Event()
        self._poll_event = asyncio.Event()
        """Event that ends the pause before the next poll."""
        self._grpc_client = _make_grpc_client(endpoint, options)
        self._task = asyncio.create_task(self._stay_connected())

    # -- placement ---------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """True while the server is connected."""
        return self._connected_event.is_set()

    @property
    def accepts_sessions(self) -> bool:
        """True when the server accepts new sessions."""
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

        A poll is assumed to count all sessions whose open was sent before it, because a server
        counts a session as soon as its open arrives. `num_free` does not rely on this.
        """
        num_estimated = max(self._num_polled_sessions + self._num_change_since_poll, 0)
        return min(num_estimated, max(self.max_sessions, self._num_polled_sessions))

    @property
    def num_free(self) -> int:
        """Number of new sessions that the server accepts now."""
        if self._is_full or not self.accepts_sessions:
            return 0
        num_free = max(self.max_sessions - self.num_sessions - self._num_uncertain_sessions, 0)
        max_opens = self.endpoint.max_opens
        if max_opens is None:
            return num_free
        return min(num_free, max(max_opens - self.num_placed_sessions, 0))

    @property
    def is_used_up(self) -> bool:
        """True when sessions were placed here and all of them have ended."""
        return 0 < self.num_placed_sessions <= self.num_ended_sessions

    def explain_loss(self, server_id: str, linger_s: float) -> str:
        """Return the reason why the sessions of `server_id` are lost, or '' while they may exist.

        Args:
            linger_s: seconds that the sessions survive a broken connection.
        """
        if self._close_reason:
            return self._close_reason
        address = self.endpoint.grpc_address
        if self.is_connected:
            has_restarted = self.server_id != server_id
            return f"server {server_id} at {address} has restarted" if has_restarted else ""
        if asyncio.get_running_loop().time() - self.broken_at_s <= linger_s:
            return ""
        return f"server {server_id} at {address} was unreachable for longer than their linger time"

    def reserve(self, num_sessions: int) -> int:
        """Reserve capacity until `confirm` or `cancel`; return the number of polls for `cancel`."""
        self._num_change_since_poll += num_sessions
        self._num_opening_sessions += num_sessions
        self.num_placed_sessions += num_sessions
        return self._num_polls

    def confirm(self, num_sessions: int) -> None:
        """Record that sessions were opened in reserved capacity."""
        self._num_opening_sessions -= num_sessions
        self.last_refusal = ""

    def cancel(self, num_sessions: int, num_polls: int) -> None:
        """Free reserved capacity that was not used.

        Args:
            num_polls: the value that `reserve` returned.
        """
        self._num_opening_sessions -= num_sessions
        self.num_ended_sessions += num_sessions
        if num_polls == self._num_polls:
            self._num_change_since_poll -= num_sessions
        else:  # a later poll has already corrected the count
            self._num_uncertain_sessions = max(self._num_uncertain_sessions - num_sessions, 0)

    def count_ended(self, num_sessions: int) -> None:
        """Count sessions that ended after the last poll."""
        self._num_change_since_poll -= num_sessions
        if self._is_polling:
            self._num_uncertain_sessions += num_sessions
        self.num_ended_sessions += num_sessions
        self._is_full = False

    def mark_full(self) -> None:
        """Place no sessions on this full server until the next poll, which is made soon."""
        self._is_full = True
        self._poll_event.set()

    def mark_refused(self, reason: str) -> None:
        """Place no sessions on this server until the next poll, because it refused one."""
        self.refusal = self.last_refusal = reason

    # -- calls -------------------------------------------------------------------------

    def find_live_stream(self, server_id: str) -> CallStream | None:
        """Return the stream to the server, or None if the server is not connected."""
        if self._connected_event.is_set() and self.server_id == server_id:
            return self._stream
        return None

    async def call(
        self, server_id: str, fill_call: Callable[[pb.Call], None], *, is_repeatable: bool = False
    ) -> pb.Reply:
        """Send a call and return the server's reply.

        Args:
            server_id: id of the server that has the session.
            fill_call: fills in the call; is called again if the call is repeated.
            is_repeatable: True if the call may be sent again after the connection broke.

        Raises:
            SessionLostError: the server restarted or is gone, or the connection broke during a
                call that must not be repeated.
            UnavailableError: the server could not be reached in time.
        """
        stream = await self._wait_for_stream(server_id)
        try:
            return await stream.start_call(fill_call)
        except ConnectionLostError:
            if not is_repeatable:
                raise
        stream = await self._wait_for_stream(server_id)
        return await stream.start_call(fill_call)

    def send_close(self, session_id: str) -> None:
        """Close a session without waiting; if the stream is broken, the session lingers."""
        stream = self._stream
        if stream is not None and stream.break_reason is None:
            stream.send_close(session_id)

    def send_detach(self, session_id: str) -> None:
        """Detach a session without waiting, so that it ends after its linger time."""
        stream = self._stream
        if stream is not None and stream.break_reason is None:
            detach = pb.Call(detach=pb.DetachRequest(session_id=session_id))
            stream.ignore_failure(stream.start_call(lambda call: call.CopyFrom(detach)))

    async def close(self, reason: str) -> None:
        """Close the connection; the server keeps its sessions for their linger time."""
        self._close_reason = reason
        self._connected_event.set()  # wakes the waiting calls, which then raise an error
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._stream is not None:
            await self._stream.close()
        await self._grpc_client.close()

    # -- the connection ----------------------------------------------------------------

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        pauses = generate_pauses(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        while True:
            try:
                await self.connect()
            except EnvError as error:
                _log.debug("server %s: %s", self.endpoint.grpc_address, error)
                self.first_attempt_event.set()
            else:
                self.first_attempt_event.set()
                self._on_change()
                connected_at_s = loop.time()
                await self._poll_until_broken()
                self._on_change()
                if loop.time() - connected_at_s > _MAX_BACKOFF_S:
                    pauses = generate_pauses(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
                    continue
            # Pause, because the server is unavailable or breaks its connections quickly.
            await asyncio.sleep(next(pauses))

    async def connect(self) -> None:
        """Open a stream and read the server's description and load."""
        self._broken_event.clear()
        self.last_refusal = ""
        grpc_stream = await self._grpc_client.connect(self._options.unreachable_after_s)
        try:
            description = await self._grpc_client.describe()
            await self.poll()
        except BaseException:
            grpc_stream.cancel()
            raise
        self.description = description
        self.server_id = description.server_id
        self._stream = CallStream(
            grpc_stream,
            self.endpoint.grpc_address,
            timeout_s=self._options.call_timeout_s,
            max_call_bytes=MAX_GATEWAY_CALL_BYTES,
            on_break=self._handle_break,
        )
        self.connected_at_s = asyncio.get_running_loop().time()
        self._connected_event.set()

    async def _poll_until_broken(self) -> None:
        """Poll the load until the stream breaks."""
        while not self._broken_event.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poll_event.wait(), self._choose_pause_s())
                self._poll_event.clear()
                await asyncio.wait_for(self._broken_event.wait(), _REFUSAL_POLL_DELAY_S)
            if not self._broken_event.is_set():
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
        self._num_uncertain_sessions = self._num_opening_sessions
        num_old_change = self._num_change_since_poll
        self._is_polling = True
        try:
            status = await self._grpc_client.status()
        finally:
            self._is_polling = False
        self._num_polled_sessions = status.num_sessions
        self._record_use(status.num_sessions > 0)
        self._num_change_since_poll -= num_old_change
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
                await self._connected_event.wait()
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

    def _handle_break(self, reason: str) -> None:
        if not self._close_reason:
            _log.info("server %s: %s", self.endpoint.grpc_address, reason)
            self._connected_event.clear()
            self.broken_at_s = asyncio.get_running_loop().time()
        self._broken_event.set()
        self._poll_event.set()


def _make_grpc_client(endpoint: ServerEndpoint, options: ServersSection) -> GrpcClient:
    read_metadata = partial(options.make_metadata, endpoint.server_id)
    scheme, _, host_and_port = endpoint.grpc_address.rstrip("/").rpartition("://")
    credentials = options.credentials
    if credentials is None and scheme == "grpcs":
        credentials = grpc.ssl_channel_credentials()
    channel = open_channel(
        host_and_port,
        credentials,
        options.server_name,
        keepalive_s=_KEEPALIVE_S,
        keepalive_timeout_s=_KEEPALIVE_TIMEOUT_S,
        options=(("grpc.http2.max_pings_without_data", 0),),
    )
    return GrpcClient(channel, endpoint.grpc_address, read_metadata, options.unreachable_after_s)

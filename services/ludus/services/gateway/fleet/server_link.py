"""The gateway's connection to one environment server, which is made again when it breaks.

    calls --call stream--> server
    run(): connect, describe --> poll Status every second --> stream broke --> connect ...

Who waits for whom: a call waits for a broken connection at most `retry_within_s`, then for
its answer; the connection waits for nobody. A server that answers under another id than
before has restarted, and its earlier sessions are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from ludus.env.backoff import doubling
from ludus.env.grpc.call_stream import CallStream, ConnectionLostError
from ludus.env.grpc.server_port import (
    ServerPort,
    channel_options,
    open_channel,
    server_name_options,
)
from ludus.env.limits import MAX_GATEWAY_CALL_BYTES
from ludus.env.types import EnvironmentDescription
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import EnvError, SessionLostError, UnavailableError
from ludus.services.gateway.fleet.endpoints import Endpoint

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0
_REFUSED_POLL_S = 0.1
"""From a server's refusal to the poll that tells how full it is: many may come at once."""
_CHANNEL_OPTIONS = (
    *channel_options(keepalive_s=10.0, keepalive_timeout_s=5.0),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How servers are reached."""

    authorization: str = ""
    """The `authorization` value that servers ask for; empty sends none."""
    poll_interval_s: float = 1.0
    unreachable_after_s: float = 3.0
    """A server that is silent for so long gets no new sessions."""
    retry_within_s: float = 5.0
    """How long a call waits for a connection that broke."""
    call_timeout_s: float = 600.0
    credentials: grpc.ChannelCredentials | None = None
    """For servers with TLS; None speaks it with grpcs:// addresses alone, and trusts the
    authorities that gRPC brings along."""
    server_name: str = ""
    """The name in the certificates of servers with TLS; empty is the host of their address."""


class ServerLink:
    """One server: where it is, how full it is, and the way to it.

    Args:
        on_change: called when the server takes sessions again, stops, or gets room.
        pause_s: how long until the next poll.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        options: LinkOptions,
        on_change: Callable[[], None],
        pause_s: Callable[[], float],
    ) -> None:
        self.endpoint = endpoint
        self.description: EnvironmentDescription | None = None
        """What the server last said; None until it was reached once."""
        self.server_id = endpoint.server_id
        self.tried = asyncio.Event()
        """Set when the first attempt to connect has ended, well or not."""
        self.refusal = ""
        """Why nothing is placed here until the next poll; empty where something is."""
        self.last_refusal = ""
        """Why the server did not take this gateway's last session; empty if it did."""
        self.is_draining = False
        self.connected_s = 0.0
        """Event loop time at which the present connection was made, or the last one."""
        self.broken_s = 0.0
        """The same for when it broke last."""
        self.max_sessions = 0
        self.num_placed = 0
        """Sessions that this gateway ever set room aside for."""
        self.num_ended = 0
        """Those among them that are known to have ended, or that never began."""
        self.used_s = asyncio.get_running_loop().time()
        """When the server last said that it holds a session, or when the link was made."""
        self.unused_s = 0.0
        """For how long it has said that it holds none: silence, of either side, says nothing."""
        self._unused_since_s: float | None = None
        self._num_polls = 0
        self._num_polled = 0
        self._num_since_poll = 0
        """Sessions that began less those that ended since the latest answered poll was sent."""
        self._num_opening = 0
        self._num_in_doubt = 0
        """Opens and ends that were under way with the latest poll: it may count them, or not."""
        self._is_polling = False
        self._is_full = False
        self._is_silent = False
        self._options = options
        self._on_change = on_change
        self._pause_s = pause_s
        self._closed_because = ""
        self._stream: CallStream | None = None
        self._up = asyncio.Event()
        self._broken = asyncio.Event()
        self._hurry = asyncio.Event()
        """Ends the pause before the next poll."""
        self._port = _port_of(endpoint, options)
        self._task = asyncio.create_task(self._run())

    # -- placement ---------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """True while calls reach the server."""
        return self._up.is_set()

    @property
    def takes_sessions(self) -> bool:
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
        """Sessions on the server as far as is known, those that are being opened included.

        A server counts a session from the moment its open arrives, so a poll is taken to know
        of those that were begun before it; where sessions are placed, that is not relied on.
        """
        known = max(self._num_polled + self._num_since_poll, 0)
        return min(known, max(self.max_sessions, self._num_polled))

    @property
    def room(self) -> int:
        """How many sessions may be placed here now."""
        if self._is_full or not self.takes_sessions:
            return 0
        room = max(self.max_sessions - self.num_sessions - self._num_in_doubt, 0)
        max_opens = self.endpoint.max_opens
        return room if max_opens is None else min(room, max(max_opens - self.num_placed, 0))

    @property
    def has_ended(self) -> bool:
        """True when sessions were placed here and all of them have ended."""
        return 0 < self.num_placed <= self.num_ended

    def reason_lost(self, server_id: str, linger_s: float) -> str:
        """Why sessions that were opened on that server are gone; empty while they may be there.

        Args:
            linger_s: how long they outlive a broken connection.
        """
        if self._closed_because:
            return self._closed_because
        address = self.endpoint.grpc_address
        if self.is_connected:
            is_same = self.server_id == server_id
            return "" if is_same else f"server {server_id} at {address} has restarted"
        silent_s = asyncio.get_running_loop().time() - self.broken_s
        if silent_s <= linger_s:
            return ""
        return f"server {server_id} at {address} is gone, or was for longer than they linger"

    def reserve(self, num_sessions: int) -> int:
        """Set room aside; `opened` or `give_back` ends that, which wants the value."""
        self._num_since_poll += num_sessions
        self._num_opening += num_sessions
        self.num_placed += num_sessions
        return self._num_polls

    def opened(self, num_sessions: int) -> None:
        """Note that sessions were opened in room that was set aside."""
        self._num_opening -= num_sessions
        self.last_refusal = ""

    def give_back(self, num_sessions: int, num_polls: int) -> None:
        """Free room that was set aside."""
        self._num_opening -= num_sessions
        self.num_ended += num_sessions
        if num_polls == self._num_polls:
            self._num_since_poll -= num_sessions
        else:  # a poll was sent since then, and knows better
            self._num_in_doubt = max(self._num_in_doubt - num_sessions, 0)

    def closed(self, num_sessions: int) -> None:
        """Counts sessions that ended since the last poll."""
        self._num_since_poll -= num_sessions
        if self._is_polling:
            self._num_in_doubt += num_sessions
        self.num_ended += num_sessions
        self._is_full = False

    def found_full(self) -> None:
        """Places nothing here until the next poll, which is near: it had no room after all."""
        self._is_full = True
        self._hurry.set()

    def refuse(self, reason: str) -> None:
        """Places nothing here until the next poll: the server would not take it."""
        self.refusal = self.last_refusal = reason

    # -- calls -------------------------------------------------------------------------

    def live_stream(self, server_id: str) -> CallStream | None:
        """The stream to that server while it is up; None asks for `call` and its patience."""
        if self._up.is_set() and self.server_id == server_id:
            return self._stream
        return None

    async def call(
        self,
        server_id: str,
        write: Callable[[pb.Call], None],
        *,
        is_repeatable: bool = False,
    ) -> pb.Reply:
        """The server's reply.

        Args:
            server_id: who must answer; another one has none of its sessions.
            write: fills in the call; for a repeatable call perhaps twice.
            is_repeatable: the call may be sent again when the connection breaks under it.

        Raises:
            SessionLostError: the server restarted or is gone, or the connection broke under
                a call that must not be repeated.
            UnavailableError: the server could not be reached in time.
        """
        stream = await self._connected_stream(server_id)
        try:
            return await stream.begin(write)
        except ConnectionLostError:
            if not is_repeatable:
                raise
        stream = await self._connected_stream(server_id)
        return await stream.begin(write)

    def send_close(self, session_id: str) -> None:
        """End a session without waiting; a broken stream leaves it to the server's linger."""
        stream = self._stream
        if stream is not None and stream.broken is None:
            stream.send_close(session_id)

    def send_detach(self, session_id: str) -> None:
        """Let a session end after its linger, without waiting."""
        stream = self._stream
        if stream is not None and stream.broken is None:

            def fill(call: pb.Call) -> None:
                call.detach.session_id = session_id

            stream.ignore_failure(stream.begin(fill))

    async def close(self, reason: str) -> None:
        """End the connection; the server keeps its sessions for their linger."""
        self._closed_because = reason
        self._up.set()  # wakes calls that wait; they see that the link is closed
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._stream is not None:
            await self._stream.close()
        await self._port.close()

    # -- the connection ----------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pauses = doubling(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
        while True:
            try:
                await self._connect()
            except EnvError as error:
                _log.debug("server %s: %s", self.endpoint.grpc_address, error)
                self.tried.set()
            else:
                self.tried.set()
                self._on_change()
                connected_s = loop.time()
                await self._poll_until_broken()
                self._on_change()
                if loop.time() - connected_s > _LAST_BACKOFF_S:
                    pauses = doubling(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
                    continue
            # It is unavailable, or accepts and breaks: do not storm it.
            await asyncio.sleep(next(pauses))

    async def _connect(self) -> None:
        """Open a stream and ask the server who it is."""
        self._broken.clear()
        self.last_refusal = ""
        duplex = await self._port.connect(self._options.unreachable_after_s)
        try:
            description = await self._port.describe()
            await self._poll()
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
            on_broken=self._on_broken,
        )
        self.connected_s = asyncio.get_running_loop().time()
        self._up.set()

    async def _poll_until_broken(self) -> None:
        """Keep the load fresh until the stream breaks."""
        while not self._broken.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self._pause_s())
                self._hurry.clear()
                await asyncio.wait_for(self._broken.wait(), _REFUSED_POLL_S)
            if not self._broken.is_set():
                await self._poll_or_note_silence()

    async def _poll_or_note_silence(self) -> None:
        try:
            await self._poll()
        except EnvError as error:
            self._is_silent = True
            _log.warning("server %s: %s", self.endpoint.grpc_address, error)
            return
        self._is_silent = False
        self._on_change()

    async def _poll(self) -> None:
        self._num_polls += 1
        self._num_in_doubt, num_before = self._num_opening, self._num_since_poll
        self._is_polling = True
        try:
            status = await self._port.status()
        finally:
            self._is_polling = False
        self._num_polled = status.num_sessions
        self._note_use(status.num_sessions > 0)
        self._num_since_poll -= num_before
        self.max_sessions = status.max_sessions
        self.is_draining = status.is_draining
        self._is_full = False
        self.refusal = ""

    def _note_use(self, is_used: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        if is_used:
            self.used_s, self._unused_since_s = now_s, None
        elif self._unused_since_s is None:
            self._unused_since_s = now_s
        self.unused_s = 0.0 if self._unused_since_s is None else now_s - self._unused_since_s

    async def _connected_stream(self, server_id: str) -> CallStream:
        """The stream once it is up, if `server_id` answers there."""
        try:
            async with asyncio.timeout(self._options.retry_within_s):
                await self._up.wait()
        except TimeoutError:
            raise UnavailableError(
                f"expected server {server_id} at {self.endpoint.grpc_address} to answer within"
                f" {self._options.retry_within_s:g} s, could not reach it; try again later"
            ) from None
        if self._closed_because:
            raise SessionLostError(f"session lost: {self._closed_because}; open a new one")
        if self.server_id != server_id:
            raise SessionLostError(
                f"session lost: its server restarted ({server_id} is {self.server_id} now);"
                " open a new one"
            )
        assert self._stream is not None, "it is up"
        return self._stream

    def _on_broken(self, reason: str) -> None:
        if not self._closed_because:
            _log.info("server %s: %s", self.endpoint.grpc_address, reason)
            self._up.clear()
            self.broken_s = asyncio.get_running_loop().time()
        self._broken.set()
        self._hurry.set()


def _port_of(endpoint: Endpoint, options: LinkOptions) -> ServerPort:
    """The way to the server's gRPC port."""
    metadata = (("authorization", options.authorization),) if options.authorization else ()
    scheme, _, target = endpoint.grpc_address.rstrip("/").rpartition("://")
    credentials = options.credentials
    if credentials is None and scheme == "grpcs":
        credentials = grpc.ssl_channel_credentials()
    name = server_name_options(options.server_name if credentials else None)
    channel = open_channel(target, credentials, (*_CHANNEL_OPTIONS, *name))
    return ServerPort(channel, endpoint.grpc_address, metadata, options.unreachable_after_s)

"""The gateway's connection to one environment server, which is made again when it breaks.

    calls --call stream--> server        StepMany --unary, raw bytes--> server
    run(): connect, describe --> poll Status every second --> stream broke --> connect ...

Who waits for whom: a call waits for a broken connection at most `retry_within_s`, then for
its answer; the connection waits for nobody. A server that answers under another id than
before has restarted, and its earlier sessions are lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from ludus.env.grpc.call_stream import CallStream, ConnectionLostError
from ludus.env.grpc.step_stream import StepStream
from ludus.env.messages.protobuf import CONNECTED_KEY, read_description
from ludus.env.transports.grpc import CHANNEL_OPTIONS, GrpcDuplex
from ludus.env.types import EnvironmentDescription
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import (
    CallTimeoutError,
    EnvError,
    SessionLostError,
    UnavailableError,
    error_from_wire,
)
from ludus.services.gateway.fleet.endpoints import Endpoint

_log = logging.getLogger(__name__)

_STEP_MANY_PATH = "/ludus.env.v1.EnvService/StepMany"
_STEP_STREAM_PATH = "/ludus.env.v1.EnvService/StepStream"
_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0
_CHANNEL_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A bandwidth probe that got no answer would keep the keepalive waiting for a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
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
    make_channel: Callable[[str, Any], grpc.aio.Channel] | None = None
    """Makes a channel from target and channel options; None makes one
    with TLS for grpcs:// addresses and one without for the others."""


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
        """Why the server did not take this gateway's last session; empty if it did."""
        self.is_draining = False
        self.connected_s = 0.0
        """Event loop time at which the present connection was made, or the last one."""
        self.max_sessions = 0
        self.num_opening = 0
        self._num_polled = 0
        self._num_since_poll = 0
        self._is_full = False
        self._is_silent = False
        self._options = options
        self._on_change = on_change
        self._pause_s = pause_s
        self._closed_because = ""
        self._stream: CallStream | None = None
        self._up = asyncio.Event()
        self._broken = asyncio.Event()
        metadata = (("authorization", options.authorization),) if options.authorization else ()
        self._metadata = metadata
        scheme, _, target = endpoint.grpc_address.rstrip("/").rpartition("://")
        make_channel = options.make_channel or _MAKE_CHANNEL[scheme == "grpcs"]
        self._channel = make_channel(target, _CHANNEL_OPTIONS)
        self._stub = env_pb2_grpc.EnvServiceStub(self._channel)
        self._step_many = self._channel.unary_unary(_STEP_MANY_PATH)
        self._step_stream = self._channel.stream_stream(_STEP_STREAM_PATH)
        self._steps: StepStream[bytes, bytes] | None = None
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
        """Sessions on the server as far as is known, those that are being opened included."""
        return max(self._num_polled + self._num_since_poll, 0) + self.num_opening

    @property
    def room(self) -> int:
        """How many sessions may be placed here now."""
        if self._is_full or not self.takes_sessions:
            return 0
        return max(self.max_sessions - self.num_sessions, 0)

    def reserve(self, num_sessions: int) -> None:
        """Sets room aside; `opened` or `give_back` ends that."""
        self.num_opening += num_sessions

    def opened(self, num_sessions: int) -> None:
        """Turns set-aside room into sessions."""
        self.num_opening -= num_sessions
        self._num_since_poll += num_sessions

    def give_back(self, num_sessions: int) -> None:
        """Frees room that was set aside."""
        self.num_opening -= num_sessions

    def closed(self, num_sessions: int) -> None:
        """Counts sessions that ended since the last poll."""
        self._num_since_poll -= num_sessions
        self._is_full = False

    def found_full(self) -> None:
        """Places nothing here until the next poll: the server had no room after all."""
        self._is_full = True

    def refuse(self, reason: str) -> None:
        """Places nothing here until the next poll: the server would not take it."""
        self.refusal = reason

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
        num_bytes: int = 0,
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
            return await _send(stream, write, num_bytes)
        except ConnectionLostError:
            if not is_repeatable:
                raise
        stream = await self._connected_stream(server_id)
        return await _send(stream, write, num_bytes)

    async def step_many(
        self,
        server_id: str,
        request: bytes,
        *,
        is_repeatable: Callable[[], bool],
        timeout_s: float | None,
        trace: tuple[tuple[str, str], ...] = (),
    ) -> bytes:
        """The server's StepManyResponse, serialised as it came; raises as `call` does.

        Args:
            trace: metadata that joins the spans of one call across processes.
        """
        metadata = (*self._metadata, *trace)
        deadline_s = asyncio.get_running_loop().time() + self._options.retry_within_s
        limit_s = min(timeout_s or self._options.call_timeout_s, self._options.call_timeout_s)
        while True:
            if self.live_stream(server_id) is None:
                await self._connected_stream(server_id)
            try:
                if trace:  # a stream's messages carry no trace of their own
                    return await self._step_many(request, metadata=metadata, timeout=limit_s)
                async with asyncio.timeout(limit_s):
                    return await self._live_steps().ask(request)
            except TimeoutError:
                failure: EnvError = CallTimeoutError(
                    f"expected an answer from {self.endpoint.grpc_address} within {limit_s:g} s,"
                    " got none"
                )
            except grpc.aio.AioRpcError as error:
                failure = self._env_error(error)
            is_over = asyncio.get_running_loop().time() > deadline_s
            if not isinstance(failure, UnavailableError) or is_over or not is_repeatable():
                raise failure
            await asyncio.sleep(_FIRST_BACKOFF_S)

    def _live_steps(self) -> StepStream[bytes, bytes]:
        if self._steps is None or self._steps.is_broken:
            self._steps = StepStream(self._step_stream(metadata=self._metadata))
        return self._steps

    def send_close(self, session_id: str) -> None:
        """Ends a session without waiting; a broken stream leaves it to the server's linger."""
        self._send_and_forget(lambda call: _write_close(call, session_id))

    def send_detach(self, session_id: str) -> None:
        """Lets a session end after its linger, without waiting."""
        self._send_and_forget(lambda call: _write_detach(call, session_id))

    async def close(self, reason: str) -> None:
        """Ends the connection; the server keeps its sessions for their linger."""
        self._closed_because = reason
        self._up.set()  # wakes calls that wait; they see that the link is closed
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._stream is not None:
            await self._stream.close()
        if self._steps is not None:
            await self._steps.close()
        await self._channel.close()

    # -- the connection ----------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self._connect()
            except EnvError as error:
                _log.debug("server %s: %s", self.endpoint.grpc_address, error)
                self.tried.set()
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
                continue
            self.tried.set()
            self._on_change()
            connected_s = loop.time()
            await self._poll_until_broken()
            self._on_change()
            if loop.time() - connected_s > _LAST_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
                continue
            # It accepts and breaks: do not storm it.
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _connect(self) -> None:
        """Returns when the server has accepted a stream and said who it is."""
        limit_s = self._options.unreachable_after_s
        self._broken.clear()
        connect = self._stub.Connect(metadata=self._metadata)
        try:
            async with asyncio.timeout(limit_s):
                await _accepted(connect)
                description = read_description(
                    await self._stub.Describe(pb.DescribeRequest(), metadata=self._metadata)
                )
                await self._poll()
        except TimeoutError:
            connect.cancel()
            raise UnavailableError(
                f"expected an environment server at {self.endpoint.grpc_address}, got no answer"
                f" within {limit_s:g} s; check the address and that the server runs"
            ) from None
        except grpc.aio.AioRpcError as error:
            connect.cancel()
            raise self._env_error(error) from None
        self.description = description
        self.server_id = description.server_id
        self._stream = CallStream(
            GrpcDuplex(connect),
            self.endpoint.grpc_address,
            timeout_s=self._options.call_timeout_s,
            on_orphan=self._close_orphans,
            on_broken=self._on_broken,
        )
        self.connected_s = asyncio.get_running_loop().time()
        self._up.set()

    async def _poll_until_broken(self) -> None:
        """Returns when the stream has broken; keeps the load fresh until then."""
        while not self._broken.is_set():
            try:
                await asyncio.wait_for(self._broken.wait(), self._pause_s())
            except TimeoutError:
                await self._poll_or_note_silence()

    async def _poll_or_note_silence(self) -> None:
        try:
            await self._poll()
        except grpc.aio.AioRpcError as error:
            self._is_silent = True
            _log.warning("server %s: %s", self.endpoint.grpc_address, error.details())
            return
        self._is_silent = False
        self._on_change()

    async def _poll(self) -> None:
        status = await self._stub.Status(
            pb.StatusRequest(),
            metadata=self._metadata,
            timeout=self._options.unreachable_after_s,
        )
        self._num_polled, self._num_since_poll = status.num_sessions, 0
        self.max_sessions = status.max_sessions
        self.is_draining = status.is_draining
        self._is_full = False
        self.refusal = ""

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
        _log.info("server %s: %s", self.endpoint.grpc_address, reason)
        if not self._closed_because:
            self._up.clear()
        self._broken.set()

    def _close_orphans(self, reply: pb.Reply) -> None:
        """Ends sessions that were opened for a caller which has gone."""
        opened = [reply.open] if reply.HasField("open") else reply.open_group.sessions
        for one in opened:
            self.send_close(one.session_id)

    def _send_and_forget(self, write: Callable[[pb.Call], None]) -> None:
        stream = self._stream
        if stream is not None and stream.broken is None:
            call, future = stream.begin()
            write(call)
            stream.ignore(future)

    def _env_error(self, error: grpc.aio.AioRpcError) -> EnvError:
        address, details = self.endpoint.grpc_address, error.details() or ""
        for key, value in error.trailing_metadata() or ():
            if key == "ludus-code":
                return error_from_wire(str(value), details)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CallTimeoutError(f"expected an answer from {address} in time, got none")
        return UnavailableError(
            f"expected an environment server at {address}, could not reach it:"
            f" {error.code().name} {details}; check the address and that the server runs"
        )


def _insecure_channel(target: str, options: Any) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=options)


def _secure_channel(target: str, options: Any) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options=options)


_MAKE_CHANNEL = {False: _insecure_channel, True: _secure_channel}


async def _accepted(connect: Any) -> None:
    """Returns when the server has accepted the stream, raises AioRpcError when it refuses."""
    await connect.wait_for_connection()
    metadata = await connect.initial_metadata()
    if CONNECTED_KEY not in dict(metadata):
        raise grpc.aio.AioRpcError(
            await connect.code(),
            metadata,
            await connect.trailing_metadata(),
            await connect.details(),
        )


async def _send(stream: CallStream, write: Callable[[pb.Call], None], num_bytes: int) -> pb.Reply:
    call, future = stream.begin(num_bytes)
    write(call)
    return await future


def _write_close(call: pb.Call, session_id: str) -> None:
    call.close.session_id = session_id


def _write_detach(call: pb.Call, session_id: str) -> None:
    call.detach.session_id = session_id

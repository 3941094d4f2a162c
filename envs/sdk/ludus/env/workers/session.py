"""A session in a worker process, as its server sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.grpc.call_stream import ConnectionLostError
from ludus.env.messages.protobuf import fill_call_tool, fill_reset_args, fill_step, read_encoded
from ludus.env.types import JsonObject
from ludus.env.workers.process import Worker
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import SessionLostError

ReadT = TypeVar("ReadT")

_CLOCK_TOLERANCE = 0.1
"""Share of a time limit that counts as expired, because timers are not exact."""


class _Host(Protocol):
    """The parts of a host that a session uses."""

    @property
    def step_timeout_s(self) -> float:
        """Time limit of a step; 0 sets no limit."""

    async def close_session(self, session: WorkerSession) -> None:
        """Close the session's environment, unless its worker is gone."""

    @property
    def shares_workers(self) -> bool:
        """True if several sessions share a worker."""


class WorkerSession:
    """A session in a worker; implements `HostedSession`, which documents its methods."""

    __slots__ = ("_call", "_host", "_last", "_started_s", "id", "worker")
    direct = None

    def __init__(self, session_id: str, worker: Worker, host: _Host) -> None:
        self.id = session_id
        self.worker = worker
        self._host = host
        self._last: EncodedResult | None = None
        self._call: asyncio.Future[pb.Reply] | None = None
        self._started_s = 0.0

    @property
    def last(self) -> EncodedResult | None:
        return self._last

    def remaining_s(self, limit_s: float) -> float:
        return 0.0

    async def open(self, with_text: bool) -> None:
        """Build the environment."""

        def fill(call: pb.Call) -> None:
            call.open.session_id = self.id
            call.open.without_text = not with_text

        await self._call_worker(fill, lambda reply: None)

    async def reset(self, args: ResetArgs) -> EncodedResult:
        def fill(call: pb.Call) -> None:
            call.reset.session_id = self.id
            fill_reset_args(call.reset.args, args)

        self._last = None
        self._last = await self._call_worker(fill, _read_result)
        return self._last

    async def step(self, action: bytes | str, step_index: int) -> EncodedResult:
        def fill(call: pb.Call) -> None:
            fill_step(call.step, self.id, action, step_index)

        result = await self._call_worker(fill, _read_result)
        if self._last is None or result.step_index != self._last.step_index:
            self._last = result
        return self._last

    async def state_json(self) -> bytes:
        def fill(call: pb.Call) -> None:
            call.state.session_id = self.id

        return await self._call_worker(fill, lambda reply: reply.state.state_json)

    async def call_tool(self, name: str, arguments: JsonObject) -> bytes:
        def fill(call: pb.Call) -> None:
            fill_call_tool(call.call_tool, self.id, name, arguments)

        return await self._call_worker(fill, lambda reply: reply.call_tool.result_json)

    async def send_close(self) -> None:
        """Close the environment."""

        def fill(call: pb.Call) -> None:
            call.close.session_id = self.id

        await self._call_worker(fill, lambda reply: None)

    async def close(self) -> None:
        await self._host.close_session(self)

    def kill(self, reason: str) -> None:
        """Kill the worker. If sessions share it, wait until the server's own limit has passed.

        A client may request a shorter limit, but must not end other sessions with it.
        """
        limit_s = self._host.step_timeout_s
        if not self._host.shares_workers:
            self.worker.kill(reason)
            return
        if limit_s <= 0:
            return
        loop = asyncio.get_running_loop()
        remaining_s = limit_s - (loop.time() - self._started_s)
        if remaining_s < limit_s * _CLOCK_TOLERANCE:
            self.worker.kill(reason)
        elif self._call is not None:
            loop.call_later(remaining_s, self._kill_unless_done, self._call, reason)

    def _kill_unless_done(self, call: asyncio.Future[pb.Reply], reason: str) -> None:
        if self._call is call:
            self.worker.kill(reason)

    def _start_call(self, fill: Callable[[pb.Call], None]) -> asyncio.Future[pb.Reply]:
        if not self.worker.is_usable:
            raise self._lost_error()
        future = self.worker.stream.begin(fill)
        self._started_s = asyncio.get_running_loop().time()
        self._call = future
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: asyncio.Future[pb.Reply]) -> None:
        if self._call is future:
            self._call = None

    async def _call_worker(
        self, fill: Callable[[pb.Call], None], read: Callable[[pb.Reply], ReadT]
    ) -> ReadT:
        try:
            reply = await self._start_call(fill)
        except ConnectionLostError:
            raise self._lost_error() from None
        try:
            return read(reply)
        except (ValueError, TypeError) as error:  # a worker runs third-party code
            self.worker.kill(f"it sent an invalid reply: {error}")
            raise self._lost_error() from None

    def _lost_error(self) -> SessionLostError:
        return SessionLostError(
            f"session {self.id!r} is gone: {self.worker.end_reason}; open a new one"
        )


def _read_result(reply: pb.Reply) -> EncodedResult:
    return read_encoded(reply.result)

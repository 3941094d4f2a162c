"""Detached sessions are attached to the next connection that calls them."""

from pathlib import Path

import grpc
import pytest

from ludus.env.encoding import ResetArgs
from ludus.env.grpc.call_server import find_called_sessions
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import make_local_host
from ludus.env.sessions.interface import Connection, OpenArgs
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from tests.env.counting_env import CountingEnv, Gate, ThreadedCountingEnv
from tests.env.polling import (
    CoreClock,
    find_busy_sessions,
    find_detached_sessions,
    wait_for_sessions,
    wait_until,
)
from tests.env.served import serve


async def test_calls_attach_a_detached_session() -> None:
    core = SessionCore(make_local_host(CountingEnv))
    opening_connection, calling_connection = Connection(), Connection()
    attaching_kinds = ("step", "reset", "state", "call_tool", "close")
    open_args = OpenArgs(ResetArgs(seed=1), linger_s=9)
    session_ids = [
        (await core.open(open_args, opening_connection)).session_id
        for _ in (*attaching_kinds, "detach", "open")
    ]
    core.release(opening_connection)
    assert find_detached_sessions(core) == set(session_ids)
    calls = [pb.Call()]
    for kind, session_id in zip((*attaching_kinds, "detach", "open"), session_ids, strict=True):
        calls.append(pb.Call())
        getattr(calls[-1], kind).session_id = session_id
    core.attach(find_called_sessions(calls), calling_connection)
    assert calling_connection.session_ids == set(session_ids[:-2])
    assert find_detached_sessions(core) == set(session_ids[-2:])


class RawConnection:
    """A Connect stream to a server."""

    def __init__(self, server):
        self.channel = grpc.aio.insecure_channel(server.grpc_address.removeprefix("grpc://"))
        self.stream = env_pb2_grpc.EnvServiceStub(self.channel).Connect()

    async def send_call(self, call: pb.Call) -> pb.Reply:
        await self.stream.write(pb.CallBatch(calls=[call]))
        (reply,) = (await self.stream.read()).replies
        assert not reply.HasField("error"), reply.error
        return reply


@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_lingering_session_ends_after_its_second_connection(
    factory, core_clock: CoreClock
) -> None:
    async with serve(factory) as server:
        opening_connection, calling_connection = RawConnection(server), RawConnection(server)
        reply = await opening_connection.send_call(
            pb.Call(open=pb.OpenRequest(reset=pb.ResetArgs(), linger_s=60))
        )
        session_id = reply.open.session_id
        await opening_connection.channel.close()
        await wait_until(lambda: find_detached_sessions(server.core))
        step = pb.StepRequest(session_id=session_id, action_json=b'{"add": 1}', step_index=1)
        await calling_connection.send_call(pb.Call(step=step))
        await calling_connection.channel.close()
        await wait_until(lambda: find_detached_sessions(server.core))
        core_clock.advance(60)
        await wait_for_sessions(server.core, 0)
        assert "60 s ago" in server.core.tombstones.find(session_id).reason


async def test_running_step_of_a_dead_client_does_not_keep_its_session_open(
    tmp_path: Path, core_clock: CoreClock
) -> None:
    gate = Gate(tmp_path)
    async with serve(gate.factory) as server:
        client = RawConnection(server)
        reply = await client.send_call(
            pb.Call(open=pb.OpenRequest(reset=pb.ResetArgs(), linger_s=60))
        )
        session_id = reply.open.session_id
        step = pb.StepRequest(session_id=session_id, action_json=b'{"add": 98}', step_index=1)
        await client.stream.write(pb.CallBatch(calls=[pb.Call(step=step)]))
        await wait_until(lambda: gate.num_entered)
        await client.channel.close()
        await wait_until(lambda: find_detached_sessions(server.core))
        core_clock.advance(1)
        gate.open()
        await wait_until(lambda: not find_busy_sessions(server.core))
        core_clock.advance(60)
        await wait_for_sessions(server.core, 0)
        assert "60 s ago" in server.core.tombstones.find(session_id).reason

"""A session that went to a new connection stays there when the end of the old one comes late.

An edge ends a client's stream; the client is quick to make a new one and to call its session on
it, while whoever served the old stream hears of its end later.
"""

import pytest

from ludus.proto.env.v1 import env_pb2 as pb
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.polling import detached_sessions, eventually
from tests.env.raw_stream import RawStream
from tests.gateway.gateways import env_server, gateway_to, sessions_of

FACTORIES = pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])


class Releases:
    """Counts the connections whose end was noticed."""

    def __init__(self, sessions, monkeypatch) -> None:
        self.count = 0
        release = sessions.release

        def counted(connection) -> None:
            release(connection)
            self.count += 1

        monkeypatch.setattr(sessions, "release", counted)


async def call(stream: RawStream, session_id: str) -> None:
    """A call that takes a session to a stream; what was sent before it has arrived after it."""
    reply = await stream.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
    assert not reply.HasField("error"), reply.error


def lingers(server, session_id: str) -> bool:
    """Whether the session ends unless somebody calls it."""
    return session_id in detached_sessions(server.core)


@FACTORIES
async def test_a_server_hears_late_that_the_old_stream_ended(factory, monkeypatch):
    async with env_server(factory) as server:
        releases = Releases(server.core, monkeypatch)
        async with RawStream(server.grpc_address) as new:
            async with RawStream(server.grpc_address) as old:
                session_id = await old.open(linger_s=20)
                await call(new, session_id)
            await eventually(lambda: releases.count == 1)
            assert not lingers(server, session_id)
        await eventually(lambda: lingers(server, session_id))


@FACTORIES
@pytest.mark.parametrize("opened_elsewhere", [False, True])
async def test_a_gateway_hears_late_that_the_old_stream_ended(
    factory, opened_elsewhere, monkeypatch
):
    async with (
        env_server(factory) as server,
        gateway_to(server) as gateway,
        RawStream(gateway.grpc_address) as new,
    ):
        releases = Releases(sessions_of(gateway), monkeypatch)
        async with gateway_to(server) as other, RawStream(other.grpc_address) as elsewhere:
            old = RawStream(gateway.grpc_address)
            session_id = await (elsewhere if opened_elsewhere else old).open()
            await call(old, session_id)
        await call(new, session_id)
        fence_id = await new.open()
        old.call.cancel()
        await eventually(lambda: releases.count == 1)
        await call(new, fence_id)
        assert not lingers(server, session_id)
        assert gateway.num_sessions == (1 if opened_elsewhere else 2)
        new.call.cancel()
        await eventually(lambda: lingers(server, session_id))
        await old.channel.close()


@FACTORIES
async def test_the_old_streams_gateway_hears_late_that_it_ended(factory, monkeypatch):
    async with (
        env_server(factory) as server,
        gateway_to(server) as first,
        gateway_to(server) as second,
        RawStream(second.grpc_address) as new,
    ):
        releases = Releases(sessions_of(first), monkeypatch)
        async with RawStream(first.grpc_address) as fence:
            async with RawStream(first.grpc_address) as old:
                session_id = await old.open()
                await call(new, session_id)
                other_id = await fence.open()
            await eventually(lambda: releases.count == 1)
            await call(fence, other_id)
            assert not lingers(server, session_id)
        new.call.cancel()
        await eventually(lambda: lingers(server, session_id))


@FACTORIES
async def test_a_server_hears_late_that_a_gateway_has_gone(factory, monkeypatch):
    async with env_server(factory) as server, gateway_to(server) as second:
        releases = Releases(server.core, monkeypatch)
        async with RawStream(second.grpc_address) as new:
            async with gateway_to(server) as first, RawStream(first.grpc_address) as old:
                session_id = await old.open()
                await call(new, session_id)
            await eventually(lambda: releases.count == 1)
            assert not lingers(server, session_id)
        await eventually(lambda: lingers(server, session_id))


async def test_a_session_of_another_gateway_that_is_lost_leaves_nothing_at_its_connection():
    async with (
        env_server() as server,
        gateway_to(server) as gateway,
        gateway_to(server) as other,
        RawStream(gateway.grpc_address) as stream,
        RawStream(other.grpc_address) as elsewhere,
    ):
        tracked = sessions_of(gateway).tracked
        session_id = await elsewhere.open()
        await call(stream, session_id)
        assert tracked.num_connected == 1
        await server.core.close(session_id)
        reply = await stream.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
        assert reply.error.code == "SESSION_LOST"
        assert tracked.num_connected == 0

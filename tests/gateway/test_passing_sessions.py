"""A session stays on its new connection when the end of the old connection arrives late.

An edge ends a client's stream. The client quickly opens a new stream and calls its session on it,
while the gateway or server of the old stream notices its end later.
"""

import pytest

from ludus.proto.env.v1 import env_pb2 as pb
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.polling import detached_sessions, wait_until
from tests.env.raw_stream import RawStream
from tests.gateway.gateways import get_sessions, make_gateway, make_server

FACTORIES = pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])


class Releases:
    """A counter of released connections."""

    def __init__(self, sessions, monkeypatch) -> None:
        self.count = 0
        release = sessions.release

        def release_and_count(connection) -> None:
            release(connection)
            self.count += 1

        monkeypatch.setattr(sessions, "release", release_and_count)


async def call(stream: RawStream, session_id: str) -> None:
    """Call a session on a stream; earlier messages have arrived when the call returns."""
    reply = await stream.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
    assert not reply.HasField("error"), reply.error


def lingers(server, session_id: str) -> bool:
    """Return whether the session lingers without a connection."""
    return session_id in detached_sessions(server.core)


@FACTORIES
async def test_late_detach_of_the_old_stream_keeps_the_session(factory, monkeypatch):
    async with make_server(factory) as server:
        releases = Releases(server.core, monkeypatch)
        async with RawStream(server.grpc_address) as new:
            async with RawStream(server.grpc_address) as old:
                session_id = await old.open(linger_s=20)
                await call(new, session_id)
            await wait_until(lambda: releases.count == 1)
            assert not lingers(server, session_id)
        await wait_until(lambda: lingers(server, session_id))


@FACTORIES
@pytest.mark.parametrize("opened_elsewhere", [False, True])
async def test_late_release_of_the_old_stream_keeps_the_session(
    factory, opened_elsewhere, monkeypatch
):
    async with (
        make_server(factory) as server,
        make_gateway(server) as gateway,
        RawStream(gateway.grpc_address) as new,
    ):
        releases = Releases(get_sessions(gateway), monkeypatch)
        async with make_gateway(server) as other, RawStream(other.grpc_address) as elsewhere:
            old = RawStream(gateway.grpc_address)
            session_id = await (elsewhere if opened_elsewhere else old).open()
            await call(old, session_id)
        await call(new, session_id)
        fence_id = await new.open()
        old.call.cancel()
        await wait_until(lambda: releases.count == 1)
        await call(new, fence_id)
        assert not lingers(server, session_id)
        assert gateway.num_sessions == (1 if opened_elsewhere else 2)
        new.call.cancel()
        await wait_until(lambda: lingers(server, session_id))
        await old.channel.close()


@FACTORIES
async def test_session_stays_alive_when_the_old_gateway_releases_it_late(factory, monkeypatch):
    async with (
        make_server(factory) as server,
        make_gateway(server) as first,
        make_gateway(server) as second,
        RawStream(second.grpc_address) as new,
    ):
        releases = Releases(get_sessions(first), monkeypatch)
        async with RawStream(first.grpc_address) as fence:
            async with RawStream(first.grpc_address) as old:
                session_id = await old.open()
                await call(new, session_id)
                other_id = await fence.open()
            await wait_until(lambda: releases.count == 1)
            await call(fence, other_id)
            assert not lingers(server, session_id)
        new.call.cancel()
        await wait_until(lambda: lingers(server, session_id))


@FACTORIES
async def test_late_detach_of_a_dead_gateway_keeps_the_session(factory, monkeypatch):
    async with make_server(factory) as server, make_gateway(server) as second:
        releases = Releases(server.core, monkeypatch)
        async with RawStream(second.grpc_address) as new:
            async with make_gateway(server) as first, RawStream(first.grpc_address) as old:
                session_id = await old.open()
                await call(new, session_id)
            await wait_until(lambda: releases.count == 1)
            assert not lingers(server, session_id)
        await wait_until(lambda: lingers(server, session_id))


async def test_lost_session_of_another_gateway_is_removed_from_its_connection():
    async with (
        make_server() as server,
        make_gateway(server) as gateway,
        make_gateway(server) as other,
        RawStream(gateway.grpc_address) as stream,
        RawStream(other.grpc_address) as elsewhere,
    ):
        tracked = get_sessions(gateway).tracked_sessions
        session_id = await elsewhere.open()
        await call(stream, session_id)
        assert tracked.num_connected_sessions == 1
        await server.core.close(session_id)
        reply = await stream.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
        assert reply.error.code == "SESSION_LOST"
        assert tracked.num_connected_sessions == 0

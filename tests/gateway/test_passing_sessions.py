"""Sessions that move to a new stream before the server or gateway detects the end of the old one.

A proxy ends a client's stream, and the client opens a new stream and calls its session there.
"""

import pytest

from ludus.proto.env.v1 import env_pb2 as pb
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.polling import find_detached_sessions, wait_until
from tests.env.raw_stream import RawStream
from tests.gateway.gateways import get_sessions, make_gateway, make_server

parametrize_factory = pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])


class ReleaseCounter:
    """A counter of released connections."""

    def __init__(self, sessions, monkeypatch) -> None:
        self.count = 0
        release = sessions.release

        def release_and_count(connection) -> None:
            release(connection)
            self.count += 1

        monkeypatch.setattr(sessions, "release", release_and_count)


async def call_session(stream: RawStream, session_id: str) -> None:
    """Call a session on a stream, which also waits for earlier messages of the stream."""
    reply = await stream.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
    assert not reply.HasField("error"), reply.error


def is_lingering(server, session_id: str) -> bool:
    """Return whether the session is waiting for a new connection."""
    return session_id in find_detached_sessions(server.core)


@parametrize_factory
async def test_late_detach_of_the_old_stream_keeps_the_session(factory, monkeypatch):
    async with make_server(factory) as server:
        release_counter = ReleaseCounter(server.core, monkeypatch)
        async with RawStream(server.grpc_address) as new_stream:
            async with RawStream(server.grpc_address) as old_stream:
                session_id = await old_stream.open(linger_s=20)
                await call_session(new_stream, session_id)
            await wait_until(lambda: release_counter.count == 1)
            assert not is_lingering(server, session_id)
        await wait_until(lambda: is_lingering(server, session_id))


@pytest.mark.slow
@parametrize_factory
@pytest.mark.parametrize("is_opened_elsewhere", [False, True])
async def test_late_release_of_the_old_stream_keeps_the_session(
    factory, is_opened_elsewhere, monkeypatch
):
    async with (
        make_server(factory) as server,
        make_gateway(server) as gateway,
        RawStream(gateway.grpc_address) as new_stream,
    ):
        release_counter = ReleaseCounter(get_sessions(gateway), monkeypatch)
        async with (
            make_gateway(server) as other_gateway,
            RawStream(other_gateway.grpc_address) as other_stream,
        ):
            old_stream = RawStream(gateway.grpc_address)
            session_id = await (other_stream if is_opened_elsewhere else old_stream).open()
            await call_session(old_stream, session_id)
        await call_session(new_stream, session_id)
        fence_session_id = await new_stream.open()
        old_stream.call.cancel()
        await wait_until(lambda: release_counter.count == 1)
        await call_session(new_stream, fence_session_id)
        assert not is_lingering(server, session_id)
        assert gateway.num_sessions == (1 if is_opened_elsewhere else 2)
        new_stream.call.cancel()
        await wait_until(lambda: is_lingering(server, session_id))
        await old_stream.channel.close()


@parametrize_factory
async def test_late_release_of_the_old_gateway_does_not_start_the_linger(factory, monkeypatch):
    async with (
        make_server(factory) as server,
        make_gateway(server) as first_gateway,
        make_gateway(server) as second_gateway,
        RawStream(second_gateway.grpc_address) as new_stream,
    ):
        release_counter = ReleaseCounter(get_sessions(first_gateway), monkeypatch)
        async with RawStream(first_gateway.grpc_address) as fence_stream:
            async with RawStream(first_gateway.grpc_address) as old_stream:
                session_id = await old_stream.open()
                await call_session(new_stream, session_id)
                fence_session_id = await fence_stream.open()
            await wait_until(lambda: release_counter.count == 1)
            await call_session(fence_stream, fence_session_id)
            assert not is_lingering(server, session_id)
        new_stream.call.cancel()
        await wait_until(lambda: is_lingering(server, session_id))


@parametrize_factory
async def test_late_detach_of_a_dead_gateway_keeps_the_session(factory, monkeypatch):
    async with make_server(factory) as server, make_gateway(server) as second_gateway:
        release_counter = ReleaseCounter(server.core, monkeypatch)
        async with RawStream(second_gateway.grpc_address) as new_stream:
            async with (
                make_gateway(server) as first_gateway,
                RawStream(first_gateway.grpc_address) as old_stream,
            ):
                session_id = await old_stream.open()
                await call_session(new_stream, session_id)
            await wait_until(lambda: release_counter.count == 1)
            assert not is_lingering(server, session_id)
        await wait_until(lambda: is_lingering(server, session_id))


async def test_lost_session_of_another_gateway_is_removed_from_connection():
    async with (
        make_server() as server,
        make_gateway(server) as gateway,
        make_gateway(server) as other_gateway,
        RawStream(gateway.grpc_address) as stream,
        RawStream(other_gateway.grpc_address) as other_stream,
    ):
        tracked_sessions = get_sessions(gateway).tracked_sessions
        session_id = await other_stream.open()
        await call_session(stream, session_id)
        assert tracked_sessions.num_connected_sessions == 1
        await server.core.close(session_id)
        reply = await stream.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
        assert reply.error.code == "SESSION_LOST"
        assert tracked_sessions.num_connected_sessions == 0

"""Gateway sessions when servers crash, restart, lose connections or have another session key."""

import asyncio
import contextlib
import signal
from contextlib import asynccontextmanager

import pytest

from ludus.env.encoding import ResetArgs
from ludus.env.sessions.interface import Connection, OpenArgs
from ludus.proto.errors import EnvError, SessionLostError, UnavailableError
from ludus.services.gateway.fleet.sources import ServerEndpoint
from ludus.services.gateway.gateway import Gateway
from ludus.services.gateway.sessions import tracked_sessions
from tests.env.polling import run_pending_tasks, wait_until
from tests.gateway.gateways import (
    FAST_POLLING,
    KEY,
    NAME,
    ListedServers,
    get_sessions,
    make_config,
    make_endpoint,
    make_gateway,
    make_server,
    start_server_process,
)

pytestmark = pytest.mark.asyncio

OPEN_ARGS = OpenArgs(ResetArgs(seed=1))
ADD_1 = b'{"add": 1}'


class BreakableProxy:
    """A TCP proxy that can cut connections and drop responses."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.drops_responses = False
        self.accepts_connections = True

    @asynccontextmanager
    async def run(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        try:
            yield f"grpc://127.0.0.1:{port}"
        finally:
            self.cut_connections()
            self._server.close()

    def cut_connections(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader, writer) -> None:
        if not self.accepts_connections:
            writer.transport.abort()
            return
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, upstream_writer}
        await asyncio.gather(
            self._pump(reader, upstream_writer, is_response=False),
            self._pump(upstream_reader, writer, is_response=True),
            return_exceptions=True,
        )
        self._writers -= {writer, upstream_writer}

    async def _pump(self, reader, writer, *, is_response: bool) -> None:
        while chunk := await reader.read(65_536):
            if is_response and self.drops_responses:
                continue
            writer.write(chunk)
            await writer.drain()


@pytest.mark.slow
async def test_killed_server_loses_no_sessions_of_other_servers(tmp_path):
    env = {"LUDUS_SESSION_KEY": KEY}
    with (
        start_server_process(tmp_path, env=env) as first_server,
        start_server_process(tmp_path, env=env) as second_server,
    ):
        async with make_gateway(
            first_server, second_server, servers=FAST_POLLING | {"retry_within_s": 1.0}
        ) as gateway:
            sessions = get_sessions(gateway)
            opened_sessions = [await sessions.open(OPEN_ARGS) for _ in range(20)]
            server_ids = {session.session_id.split("~")[1] for session in opened_sessions}
            assert len(server_ids) == 2
            first_server.process.send_signal(signal.SIGKILL)
            first_server.process.wait()
            outcomes = await asyncio.gather(
                *(sessions.step(session.session_id, ADD_1, 1) for session in opened_sessions),
                return_exceptions=True,
            )
            errors = [outcome for outcome in outcomes if isinstance(outcome, EnvError)]
            assert 0 < len(errors) < 20
            assert {str(outcome.code) for outcome in errors} <= {"SESSION_LOST", "UNAVAILABLE"}
            assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == 20 - len(
                errors
            )
            for _ in range(10):
                await sessions.open(OPEN_ARGS)


@pytest.mark.slow
async def test_sessions_of_a_restarted_server_are_lost():
    old_server = make_server()
    await old_server.start()
    port = int(old_server.grpc_address.rpartition(":")[2])
    async with make_gateway(old_server) as gateway:
        sessions = get_sessions(gateway)
        session = await sessions.open(OPEN_ARGS)
        await old_server.stop()
        new_server = make_server(grpc_port=port)
        async with new_server:
            with pytest.raises(SessionLostError, match="restarted"):
                await sessions.step(session.session_id, ADD_1, 1)
            assert gateway.num_sessions == 0
            assert await sessions.open(OPEN_ARGS)
            assert new_server.core.load.num_sessions == 1


@pytest.mark.slow
async def test_step_waits_until_gateway_connects_to_restarted_server(monkeypatch):
    old_server = make_server()
    await old_server.start()
    port = int(old_server.grpc_address.rpartition(":")[2])
    async with make_gateway(old_server) as quick_gateway, make_gateway(old_server) as late_gateway:
        (link,) = get_sessions(late_gateway).fleet.links
        connect, connect_event = link.connect, asyncio.Event()

        async def connect_later() -> None:
            await connect_event.wait()
            await connect()

        monkeypatch.setattr(link, "connect", connect_later)
        await old_server.stop()
        async with make_server(grpc_port=port):
            session = await get_sessions(quick_gateway).open(OPEN_ARGS)
            step_task = asyncio.create_task(
                get_sessions(late_gateway).step(session.session_id, ADD_1, 1)
            )
            await run_pending_tasks()
            connect_event.set()
            assert (await step_task).step_index == 1


async def count_lost_sessions(gateway) -> float:
    text = (await gateway.metrics.render())[0].decode()
    (line,) = [
        line for line in text.splitlines() if line.startswith("ludus_gateway_sessions_lost_t")
    ]
    return float(line.rpartition(" ")[2])


@pytest.mark.slow
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_idle_sessions_of_a_stopped_server_count_as_lost(is_restarted, caplog):
    server, other_server = make_server(), make_server()
    await server.start()
    port = int(server.grpc_address.rpartition(":")[2])
    limits = {"linger_s": 3600.0 if is_restarted else 0.3}
    async with other_server, make_gateway(server, other_server, sessions=limits) as gateway:
        sessions = get_sessions(gateway)
        opened_sessions = [await sessions.open(OPEN_ARGS) for _ in range(10)]
        num_other_sessions = other_server.core.load.num_sessions
        assert 0 < num_other_sessions < 10
        sessions.tracked_sessions.sweep_interval_s = 0.1
        await server.stop()
        async with make_server(grpc_port=port) if is_restarted else contextlib.nullcontext():
            await wait_until(lambda: gateway.num_sessions == num_other_sessions)
            assert await count_lost_sessions(gateway) == 10 - num_other_sessions
        assert f"lost {10 - num_other_sessions} sessions: server" in caplog.text
        assert opened_sessions


@pytest.mark.slow
async def test_session_closed_after_server_death_counts_as_lost():
    server = make_server()
    await server.start()
    async with make_gateway(server, servers=FAST_POLLING | {"retry_within_s": 0.1}) as gateway:
        sessions = get_sessions(gateway)
        lost_session, closed_session = [await sessions.open(OPEN_ARGS) for _ in range(2)]
        await sessions.close(closed_session.session_id)
        assert await count_lost_sessions(gateway) == 0
        await server.stop()
        await sessions.close(lost_session.session_id)
        assert (gateway.num_sessions, await count_lost_sessions(gateway)) == (0, 1)


async def test_step_is_applied_once_when_the_connection_breaks():
    async with make_server() as server:
        proxy = BreakableProxy(server.grpc_address)
        async with proxy.run() as address, Gateway(make_config(address)) as gateway:
            sessions = get_sessions(gateway)
            session = await sessions.open(OPEN_ARGS)
            proxy.drops_responses = True
            step_task = asyncio.create_task(sessions.step(session.session_id, ADD_1, 1))
            await wait_until(lambda: b'"total":1' in read_state(server, session.session_id))
            proxy.drops_responses = False
            proxy.cut_connections()
            result = await asyncio.wait_for(step_task, 60)
            assert (result.reward, result.step_index) == (1.0, 1)
            assert (await sessions.step(session.session_id, ADD_1, 2)).step_index == 2


async def test_step_without_an_index_is_never_sent_twice():
    async with make_server() as server:
        proxy = BreakableProxy(server.grpc_address)
        async with proxy.run() as address, Gateway(make_config(address)) as gateway:
            sessions = get_sessions(gateway)
            session = await sessions.open(OPEN_ARGS)
            proxy.drops_responses = True
            step_task = asyncio.create_task(sessions.step(session.session_id, ADD_1))
            await wait_until(lambda: b'"total":1' in read_state(server, session.session_id))
            proxy.drops_responses = False
            proxy.cut_connections()
            with pytest.raises(SessionLostError):
                await asyncio.wait_for(step_task, 60)
            assert b'"total":1' in read_state(server, session.session_id)


@pytest.mark.slow
async def test_idle_client_keeps_session_when_the_gateway_link_breaks(monkeypatch):
    async with make_server() as server:
        proxy = BreakableProxy(server.grpc_address)
        monkeypatch.setattr(tracked_sessions, "MAX_SWEEP_INTERVAL_S", 0.1)
        async with (
            proxy.run() as address,
            Gateway(make_config(address)) as gateway,
        ):
            sessions = get_sessions(gateway)
            connection = Connection()
            session = await sessions.open(OPEN_ARGS, connection)
            detach_times_s: list[float] = []
            server_session = server.core.open_sessions[session.session_id]
            detach = server.core.detach

            async def record_detach(session_id: str, connection: Connection) -> None:
                await detach(session_id, connection)
                detach_times_s.append(server_session.detached_s)

            monkeypatch.setattr(server.core, "detach", record_detach)
            proxy.cut_connections()
            # Each reconnection of the gateway restarts the linger time of the session.
            await wait_until(lambda: len(detach_times_s) >= 4)
            assert sorted(set(detach_times_s)) == detach_times_s
            assert (await sessions.step(session.session_id, ADD_1, 1)).step_index == 1
            server_session.linger_s = 0.1
            sessions.release(connection)
            await wait_until(lambda: server.core.load.num_sessions == 0)


@pytest.mark.slow
async def test_unreachable_server_gets_no_sessions_and_steps_fail():
    async with make_server() as first_server, make_server() as second_server:
        proxy = BreakableProxy(first_server.grpc_address)
        async with proxy.run() as address:
            servers = {"poll_interval_s": 0.1, "retry_within_s": 0.5, "unreachable_after_s": 1.0}
            config = make_config(address, second_server.grpc_address, servers=servers)
            async with Gateway(config) as gateway:
                sessions = get_sessions(gateway)
                opened_sessions = [await sessions.open(OPEN_ARGS) for _ in range(10)]
                proxy.accepts_connections = False
                proxy.cut_connections()
                unreachable_sessions = [
                    session
                    for session in opened_sessions
                    if session.session_id.split("~")[1] == read_server_id(first_server)
                ]
                assert unreachable_sessions
                with pytest.raises(UnavailableError) as error:
                    await sessions.step(unreachable_sessions[0].session_id, ADD_1, 1)
                assert str(error.value.code) == "UNAVAILABLE"
                num_sessions = second_server.core.load.num_sessions
                for _ in range(5):
                    await sessions.open(OPEN_ARGS)
                assert second_server.core.load.num_sessions == num_sessions + 5
                assert sessions.environment_load.num_unreachable_servers == 1
                proxy.accepts_connections = True
                await wait_until(lambda: sessions.environment_load.num_servers == 2)
                assert (
                    await sessions.step(unreachable_sessions[0].session_id, ADD_1, 1)
                ).reward == 1.0


@pytest.mark.slow
async def test_unresponsive_server_gets_no_new_sessions(tmp_path):
    servers = {"poll_interval_s": 0.1, "unreachable_after_s": 0.5, "retry_within_s": 1.0}
    with start_server_process(tmp_path, env={"LUDUS_SESSION_KEY": KEY}) as frozen_server:
        second_server = make_server()
        async with (
            second_server,
            make_gateway(frozen_server, second_server, servers=servers) as gateway,
        ):
            sessions = get_sessions(gateway)
            link = sessions.fleet.find_link_by_key(frozen_server.grpc_address)
            frozen_server.process.send_signal(signal.SIGSTOP)
            try:
                await wait_until(lambda: not link.accepts_sessions)
                for _ in range(5):
                    await sessions.open(OPEN_ARGS)
            finally:
                frozen_server.process.send_signal(signal.SIGCONT)
            await wait_until(lambda: sessions.environment_load.num_servers == 2)


@pytest.mark.slow
async def test_servers_with_another_session_key_are_reported_and_skipped(monkeypatch):
    wrong_key_server, keyless_server = (
        make_server(session_key="another-key-0123456789"),
        make_server(session_key=None),
    )
    async with wrong_key_server, keyless_server, make_server() as valid_server:
        async with make_gateway(wrong_key_server, keyless_server) as gateway:
            fleet = get_sessions(gateway).fleet

            async def poll(size: int) -> None:  # runs between two attempts to open
                for link in fleet.links:
                    await link.poll()

            monkeypatch.setattr(get_sessions(gateway).opener, "make_room", poll)
            with pytest.raises(UnavailableError, match="session key"):
                await get_sessions(gateway).open(OPEN_ARGS)
        async with make_gateway(wrong_key_server, keyless_server, valid_server) as gateway:
            for _ in range(6):
                await get_sessions(gateway).open(OPEN_ARGS)
            assert valid_server.core.load.num_sessions == 6


async def test_removed_server_is_used_after_being_listed_again():
    async with make_server() as first_server, make_server() as second_server:
        source = ListedServers(make_endpoint(first_server), make_endpoint(second_server))
        async with Gateway(make_config(first_server.grpc_address), {NAME: source}) as gateway:
            sessions = get_sessions(gateway)
            opened_sessions = [await sessions.open(OPEN_ARGS) for _ in range(8)]
            source.list(make_endpoint(second_server))
            source.list(make_endpoint(first_server), make_endpoint(second_server))
            await wait_until(lambda: sessions.environment_load.num_servers == 2)
            for session in opened_sessions:
                assert (await sessions.step(session.session_id, ADD_1, 1)).reward == 1.0


async def test_unreachable_address_does_not_block_gateway_start():
    async with make_server() as server:
        unreachable_endpoint = ServerEndpoint("unreachable", "grpc://127.0.0.1:1", "")
        source = ListedServers(unreachable_endpoint, make_endpoint(server))
        async with Gateway(make_config("grpc://127.0.0.1:1"), {NAME: source}) as gateway:
            assert await get_sessions(gateway).open(OPEN_ARGS)


def read_state(server, session_id: str) -> bytes:
    return server.core.open_sessions[session_id].hosted_session.inline_session.read_state()


def read_server_id(server) -> str:
    return server.core.options.server_id

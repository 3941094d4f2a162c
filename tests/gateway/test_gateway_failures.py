"""Servers that die, restart, break connections or have another key."""

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
    server_process,
)

pytestmark = pytest.mark.asyncio

SEEDED = OpenArgs(ResetArgs(seed=1))
ADD_1 = b'{"add": 1}'


class Cable:
    """A TCP proxy that can cut connections and drop responses."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.swallows_answers = False
        self.is_connected = True

    @asynccontextmanager
    async def plugged_in(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        try:
            yield f"grpc://127.0.0.1:{port}"
        finally:
            self.cut()
            self._server.close()

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader, writer) -> None:
        if not self.is_connected:
            writer.transport.abort()
            return
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, upstream_writer}
        await asyncio.gather(
            self._pump(reader, upstream_writer, is_answer=False),
            self._pump(upstream_reader, writer, is_answer=True),
            return_exceptions=True,
        )
        self._writers -= {writer, upstream_writer}

    async def _pump(self, reader, writer, *, is_answer: bool) -> None:
        while data := await reader.read(65_536):
            if is_answer and self.swallows_answers:
                continue
            writer.write(data)
            await writer.drain()


def error_code(caught) -> str:
    return str(caught.value.code)


@pytest.mark.slow
async def test_a_killed_server_loses_its_own_sessions_only(tmp_path):
    env = {"LUDUS_SESSION_KEY": KEY}
    with server_process(tmp_path, env=env) as line, server_process(tmp_path, env=env) as other:
        async with make_gateway(
            line, other, servers=FAST_POLLING | {"retry_within_s": 1.0}
        ) as gateway:
            sessions = get_sessions(gateway)
            opened = [await sessions.open(SEEDED) for _ in range(20)]
            by_id = {line.session_id.split("~")[1] for line in opened}
            assert len(by_id) == 2
            line.process.send_signal(signal.SIGKILL)
            line.process.wait()
            outcomes = await asyncio.gather(
                *(sessions.step(o.session_id, ADD_1, 1) for o in opened), return_exceptions=True
            )
            failed = [o for o in outcomes if isinstance(o, EnvError)]
            assert 0 < len(failed) < 20
            assert {str(o.code) for o in failed} <= {"SESSION_LOST", "UNAVAILABLE"}
            assert sum(not isinstance(o, BaseException) for o in outcomes) == 20 - len(failed)
            for _ in range(10):
                await sessions.open(SEEDED)


async def test_sessions_of_a_restarted_server_are_lost():
    first = make_server()
    await first.start()
    port = int(first.grpc_address.rpartition(":")[2])
    async with make_gateway(first) as gateway:
        sessions = get_sessions(gateway)
        opened = await sessions.open(SEEDED)
        await first.stop()
        second = make_server(grpc_port=port)
        async with second:
            with pytest.raises(SessionLostError, match="restarted"):
                await sessions.step(opened.session_id, ADD_1, 1)
            assert gateway.num_sessions == 0
            assert await sessions.open(SEEDED)
            assert second.core.load.num_sessions == 1


async def test_session_on_a_restarted_server_waits_for_a_late_gateway(monkeypatch):
    first = make_server()
    await first.start()
    port = int(first.grpc_address.rpartition(":")[2])
    async with make_gateway(first) as quick, make_gateway(first) as slow:
        (link,) = get_sessions(slow).fleet.links
        connect, may_connect = link.connect, asyncio.Event()

        async def connect_later() -> None:
            await may_connect.wait()
            await connect()

        monkeypatch.setattr(link, "connect", connect_later)
        await first.stop()
        async with make_server(grpc_port=port):
            opened = await get_sessions(quick).open(SEEDED)
            step = asyncio.create_task(get_sessions(slow).step(opened.session_id, ADD_1, 1))
            await run_pending_tasks()
            may_connect.set()
            assert (await step).step_index == 1


async def num_lost(gateway) -> float:
    text = (await gateway.metrics.render())[0].decode()
    (line,) = [
        line for line in text.splitlines() if line.startswith("ludus_gateway_sessions_lost_t")
    ]
    return float(line.rpartition(" ")[2])


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True])
async def test_uncalled_sessions_are_counted_when_their_server_is_lost(comes_back, caplog):
    first, kept = make_server(), make_server()
    await first.start()
    port = int(first.grpc_address.rpartition(":")[2])
    limits = {"linger_s": 3600.0 if comes_back else 0.3}
    async with kept, make_gateway(first, kept, sessions=limits) as gateway:
        sessions = get_sessions(gateway)
        opened = [await sessions.open(SEEDED) for _ in range(10)]
        num_kept = kept.core.load.num_sessions
        assert 0 < num_kept < 10
        sessions.tracked_sessions.sweep_interval_s = 0.1
        await first.stop()
        async with make_server(grpc_port=port) if comes_back else contextlib.nullcontext():
            await wait_until(lambda: gateway.num_sessions == num_kept)
            assert await num_lost(gateway) == 10 - num_kept
        assert f"lost {10 - num_kept} sessions: server" in caplog.text
        assert opened


async def test_a_session_that_is_closed_after_its_server_died_was_lost():
    server = make_server()
    await server.start()
    async with make_gateway(server, servers=FAST_POLLING | {"retry_within_s": 0.1}) as gateway:
        sessions = get_sessions(gateway)
        line, other = [await sessions.open(SEEDED) for _ in range(2)]
        await sessions.close(other.session_id)
        assert await num_lost(gateway) == 0
        await server.stop()
        await sessions.close(line.session_id)
        assert (gateway.num_sessions, await num_lost(gateway)) == (0, 1)


async def test_a_step_whose_connection_breaks_is_answered_once_by_the_same_server():
    async with make_server() as server:
        cable = Cable(server.grpc_address)
        async with cable.plugged_in() as address, Gateway(make_config(address)) as gateway:
            sessions = get_sessions(gateway)
            opened = await sessions.open(SEEDED)
            cable.swallows_answers = True
            stepping = asyncio.create_task(sessions.step(opened.session_id, ADD_1, 1))
            await wait_until(lambda: b'"total":1' in read_state(server, opened.session_id))
            cable.swallows_answers = False
            cable.cut()
            result = await asyncio.wait_for(stepping, 60)
            assert (result.reward, result.step_index) == (1.0, 1)
            assert (await sessions.step(opened.session_id, ADD_1, 2)).step_index == 2


async def test_an_unnumbered_step_is_never_sent_twice():
    async with make_server() as server:
        cable = Cable(server.grpc_address)
        async with cable.plugged_in() as address, Gateway(make_config(address)) as gateway:
            sessions = get_sessions(gateway)
            opened = await sessions.open(SEEDED)
            cable.swallows_answers = True
            stepping = asyncio.create_task(sessions.step(opened.session_id, ADD_1))
            await wait_until(lambda: b'"total":1' in read_state(server, opened.session_id))
            cable.swallows_answers = False
            cable.cut()
            with pytest.raises(SessionLostError):
                await asyncio.wait_for(stepping, 60)
            assert b'"total":1' in read_state(server, opened.session_id)


@pytest.mark.slow
async def test_a_silent_client_keeps_its_session_when_only_the_gateways_link_broke(monkeypatch):
    async with make_server() as server:
        cable = Cable(server.grpc_address)
        monkeypatch.setattr(tracked_sessions, "MAX_SWEEP_INTERVAL_S", 0.1)
        async with (
            cable.plugged_in() as address,
            Gateway(make_config(address)) as gateway,
        ):
            sessions = get_sessions(gateway)
            connection = Connection()
            thinking = await sessions.open(SEEDED, connection)
            lingers_since_s: list[float] = []
            entry = server.core.open_sessions[thinking.session_id]
            detach = server.core.detach

            async def note(session_id: str, connection: Connection) -> None:
                await detach(session_id, connection)
                lingers_since_s.append(entry.detached_s)

            monkeypatch.setattr(server.core, "detach", note)
            cable.cut()
            # The session lingers on the server; the gateway restarts the linger time repeatedly.
            await wait_until(lambda: len(lingers_since_s) >= 4)
            assert sorted(set(lingers_since_s)) == lingers_since_s
            assert (await sessions.step(thinking.session_id, ADD_1, 1)).step_index == 1
            entry.linger_s = 0.1
            sessions.release(connection)
            await wait_until(lambda: server.core.load.num_sessions == 0)


@pytest.mark.slow
async def test_absent_server_gets_no_sessions_and_is_unavailable_in_time():
    async with make_server() as line, make_server() as other:
        cable = Cable(line.grpc_address)
        async with cable.plugged_in() as address:
            servers = {"poll_interval_s": 0.1, "retry_within_s": 0.5, "unreachable_after_s": 1.0}
            config = make_config(address, other.grpc_address, servers=servers)
            async with Gateway(config) as gateway:
                sessions = get_sessions(gateway)
                opened = [await sessions.open(SEEDED) for _ in range(10)]
                cable.is_connected = False
                cable.cut()
                absent = [o for o in opened if o.session_id.split("~")[1] == read_server_id(line)]
                assert absent
                with pytest.raises(UnavailableError) as caught:
                    await sessions.step(absent[0].session_id, ADD_1, 1)
                assert error_code(caught) == "UNAVAILABLE"
                previous = other.core.load.num_sessions
                for _ in range(5):
                    await sessions.open(SEEDED)
                assert other.core.load.num_sessions == previous + 5
                assert sessions.environment_load.num_unreachable_servers == 1
                cable.is_connected = True
                await wait_until(lambda: sessions.environment_load.num_servers == 2)
                assert (await sessions.step(absent[0].session_id, ADD_1, 1)).reward == 1.0


@pytest.mark.slow
async def test_a_silent_server_gets_no_new_sessions(tmp_path):
    servers = {"poll_interval_s": 0.1, "unreachable_after_s": 0.5, "retry_within_s": 1.0}
    with server_process(tmp_path, env={"LUDUS_SESSION_KEY": KEY}) as frozen:
        other = make_server()
        async with other, make_gateway(frozen, other, servers=servers) as gateway:
            sessions = get_sessions(gateway)
            link = sessions.fleet.find_link_by_key(frozen.grpc_address)
            frozen.process.send_signal(signal.SIGSTOP)
            try:
                await wait_until(lambda: not link.accepts_sessions)
                for _ in range(5):
                    await sessions.open(SEEDED)
            finally:
                frozen.process.send_signal(signal.SIGCONT)
            await wait_until(lambda: sessions.environment_load.num_servers == 2)


async def test_servers_with_another_session_key_are_reported_and_skipped(monkeypatch):
    wrong, keyless = (
        make_server(session_key="another-key-0123456789"),
        make_server(session_key=None),
    )
    async with wrong, keyless, make_server() as right:
        async with make_gateway(wrong, keyless) as gateway:
            fleet = get_sessions(gateway).fleet

            async def poll(size: int) -> None:  # a poll between two attempts
                for link in fleet.links:
                    await link.poll()

            monkeypatch.setattr(get_sessions(gateway).opener, "make_room", poll)
            with pytest.raises(UnavailableError, match="session key"):
                await get_sessions(gateway).open(SEEDED)
        async with make_gateway(wrong, keyless, right) as gateway:
            for _ in range(6):
                await get_sessions(gateway).open(SEEDED)
            assert right.core.load.num_sessions == 6


async def test_removed_server_is_used_again_when_it_is_listed_again():
    async with make_server() as line, make_server() as other:
        source = ListedServers(make_endpoint(line), make_endpoint(other))
        async with Gateway(make_config(line.grpc_address), {NAME: source}) as gateway:
            sessions = get_sessions(gateway)
            opened = [await sessions.open(SEEDED) for _ in range(8)]
            source.list(make_endpoint(other))
            source.list(make_endpoint(line), make_endpoint(other))
            await wait_until(lambda: sessions.environment_load.num_servers == 2)
            for one_opened in opened:
                assert (await sessions.step(one_opened.session_id, ADD_1, 1)).reward == 1.0


async def test_unreachable_address_does_not_block_the_start():
    async with make_server() as server:
        silent = ServerEndpoint("nothing", "grpc://127.0.0.1:1", "")
        source = ListedServers(silent, make_endpoint(server))
        async with Gateway(make_config("grpc://127.0.0.1:1"), {NAME: source}) as gateway:
            assert await get_sessions(gateway).open(SEEDED)


def read_state(server, session_id: str) -> bytes:
    return server.core.open_sessions[session_id].hosted_session.inline_session.read_state()


def read_server_id(server) -> str:
    return server.core.options.server_id

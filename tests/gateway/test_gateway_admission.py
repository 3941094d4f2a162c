"""Admission, waiting and refusal of opens, and the release of sessions."""

import asyncio
import dataclasses
import json
import threading

import httpx
import pytest
import websockets

from ludus.env.client import AsyncEnvClient
from ludus.env.encoding import ResetArgs
from ludus.env.sessions.interface import Connection, OpenArgs
from ludus.proto.errors import (
    CapacityError,
    EnvError,
    GroupMismatchError,
    InvalidCallError,
    UnavailableError,
)
from ludus.services.gateway.gateway import Gateway
from tests.env.counting_env import Gate
from tests.env.polling import wait_until
from tests.gateway.gateways import (
    FAST_POLLING,
    NAME,
    CountingEnv,
    ListedServers,
    ThreadedCountingEnv,
    count_sessions,
    get_sessions,
    make_config,
    make_endpoint,
    make_gateway,
    make_server,
    run_gateway,
)

pytestmark = pytest.mark.asyncio

OPEN_ARGS = OpenArgs(ResetArgs(seed=1))
SMALL_SERVER_OPTIONS = {"max_sessions": 2}


def get_capacity(gateway: Gateway) -> int:
    return get_sessions(gateway).environment_load.capacity


@pytest.mark.slow
async def test_full_fleet_without_queue_refuses_with_a_retry_delay():
    limits = {"queue_timeout_s": 0.0}
    async with run_gateway(2, server_options=SMALL_SERVER_OPTIONS, sessions=limits) as (
        gateway,
        servers,
    ):
        sessions = get_sessions(gateway)
        for _ in range(4):
            await sessions.open(OPEN_ARGS)
        with pytest.raises(CapacityError, match="4/4") as error:
            await sessions.open(OPEN_ARGS)
        assert error.value.retry_after_s > 0
        async with httpx.AsyncClient(timeout=60) as http_client:
            response = await http_client.post(f"{gateway.http_address}/envs/{NAME}/reset", json={})
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
        assert count_sessions(servers) == 4


async def test_waiting_opens_are_admitted_in_order_of_arrival():
    async with run_gateway(server_options=SMALL_SERVER_OPTIONS) as (gateway, _):
        sessions = get_sessions(gateway)
        held_sessions = [await sessions.open(OPEN_ARGS) for _ in range(2)]
        admission_order: list[int] = []

        async def open_and_close(number: int) -> None:
            session = await sessions.open(OPEN_ARGS)
            admission_order.append(number)
            await sessions.close(session.session_id)

        tasks = []
        for number in range(8):
            tasks.append(asyncio.create_task(open_and_close(number)))
            await wait_until(lambda number=number: sessions.load.num_waiting == number + 1)
        await sessions.close(held_sessions[0].session_id)
        await asyncio.gather(*tasks)
        assert admission_order == list(range(8))


async def test_queue_length_is_limited():
    limits = {"queue_size": 2, "queue_timeout_s": 600}
    async with run_gateway(server_options=SMALL_SERVER_OPTIONS, sessions=limits) as (
        gateway,
        servers,
    ):
        sessions = get_sessions(gateway)
        for _ in range(2):
            await sessions.open(OPEN_ARGS)
        tasks = [asyncio.create_task(sessions.open(OPEN_ARGS)) for _ in range(2)]
        await wait_until(lambda: sessions.load.num_waiting == 2)
        with pytest.raises(CapacityError):
            await asyncio.wait_for(sessions.open(OPEN_ARGS), 60)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sessions.load.num_waiting == 0
        assert count_sessions(servers) == 2


async def test_queue_time_is_limited():
    limits = {"queue_timeout_s": 0.3}
    async with run_gateway(server_options=SMALL_SERVER_OPTIONS, sessions=limits) as (
        gateway,
        servers,
    ):
        sessions = get_sessions(gateway)
        for _ in range(2):
            await sessions.open(OPEN_ARGS)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        with pytest.raises(CapacityError):
            await asyncio.wait_for(sessions.open(OPEN_ARGS), 60)
        assert loop.time() - start_s > 0.25
        assert sessions.load.num_waiting == 0
        assert count_sessions(servers) == 2


async def test_waiting_group_counts_all_sessions_as_demand():
    """The demand includes each session of the group, so that autoscaling adds enough servers."""
    async with run_gateway(server_options=SMALL_SERVER_OPTIONS) as (gateway, _):
        sessions = get_sessions(gateway)
        open_task = asyncio.create_task(sessions.open_group(OPEN_ARGS, 5))
        await wait_until(lambda: sessions.load.num_waiting == 5)
        open_task.cancel()
        await asyncio.gather(open_task, return_exceptions=True)
        assert sessions.load.num_waiting == 0


async def test_session_closed_on_the_server_admits_a_waiting_open():
    async with run_gateway(server_options=SMALL_SERVER_OPTIONS) as (gateway, servers):
        sessions = get_sessions(gateway)
        held_sessions = [await sessions.open(OPEN_ARGS) for _ in range(2)]
        open_task = asyncio.create_task(sessions.open(OPEN_ARGS))
        await wait_until(lambda: sessions.load.num_waiting == 1)
        await servers[0].core.close(held_sessions[0].session_id)
        await asyncio.wait_for(open_task, 60)


async def test_slow_opening_session_is_counted_once():
    start_event = threading.Event()

    class SlowEnv(ThreadedCountingEnv):
        def reset(self, **fields):
            if not fields.get("start"):
                start_event.wait()
            return super().reset(**fields)

    async with run_gateway(factory=SlowEnv, server_options={"max_sessions": 5}) as (
        gateway,
        servers,
    ):
        sessions = get_sessions(gateway)
        open_tasks = [asyncio.create_task(sessions.open(OPEN_ARGS)) for _ in range(4)]
        try:
            await wait_until(lambda: count_sessions(servers) == 4)
            # The gateway did not open this session, so only a poll can report it.
            await servers[0].core.open(OpenArgs(ResetArgs(options={"start": 1})))
            await wait_until(lambda: sessions.environment_load.num_active != 4)
            assert sessions.environment_load.num_active == 5
        finally:
            start_event.set()
        opened_sessions = await asyncio.gather(*open_tasks)
        assert sessions.environment_load.num_active == 5
        await sessions.close(opened_sessions[0].session_id)
        assert sessions.environment_load.num_active == 4


@pytest.mark.slow
async def test_cancelled_open_leaves_no_session():
    async with run_gateway(factory=ThreadedCountingEnv) as (gateway, servers):
        sessions = get_sessions(gateway)
        for _ in range(20):
            open_task = asyncio.create_task(sessions.open(OPEN_ARGS))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            open_task.cancel()
            await asyncio.gather(open_task, return_exceptions=True)
        await asyncio.sleep(0.2)
        await wait_until(lambda: count_sessions(servers) == 0)
        await wait_until(lambda: gateway.num_sessions == 0)
        await wait_until(lambda: sessions.load.num_sessions == 0)


@pytest.mark.slow
async def test_two_gateways_do_not_overbook_shared_servers():
    options = {"max_sessions": 10}
    limits = {"queue_timeout_s": 1.0}
    async with (
        run_gateway(2, server_options=options, sessions=limits) as (first_gateway, servers),
        make_gateway(*servers, sessions=limits) as second_gateway,
    ):
        outcomes = await asyncio.gather(
            *(
                get_sessions(gateway).open(OPEN_ARGS)
                for gateway in (first_gateway, second_gateway) * 15
            ),
            return_exceptions=True,
        )
        refusals = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert len(outcomes) - len(refusals) == 20
        assert all(isinstance(refusal, CapacityError) for refusal in refusals)
        assert [server.core.load.num_sessions for server in servers] == [10, 10]


@pytest.mark.slow
async def test_open_refused_by_full_servers_waits_for_capacity():
    options = {"max_sessions": 1}
    limits = {"queue_timeout_s": 60.0}
    rare_polling = FAST_POLLING | {"poll_interval_s": 3600.0}
    async with (
        run_gateway(10, server_options=options, sessions=limits, servers=rare_polling) as (
            first_gateway,
            servers,
        ),
        make_gateway(*servers) as second_gateway,
    ):
        opened_sessions = [await get_sessions(second_gateway).open(OPEN_ARGS) for _ in servers]
        open_task = asyncio.create_task(get_sessions(first_gateway).open(OPEN_ARGS))
        await wait_until(
            lambda: open_task.done() or get_sessions(first_gateway).admission.num_waiting
        )
        assert not open_task.done()
        await get_sessions(second_gateway).close(opened_sessions[0].session_id)
        assert (await open_task).first_result is not None
        assert count_sessions(servers) == 10


@pytest.mark.slow
async def test_sessions_are_spread_evenly():
    async with run_gateway(4) as (gateway, servers):
        sessions = get_sessions(gateway)
        await asyncio.gather(*(sessions.open(OPEN_ARGS) for _ in range(200)))
        loads = [server.core.load.num_sessions for server in servers]
        assert sum(loads) == 200
        assert max(loads) - min(loads) <= 20, loads


# -- groups ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_group_larger_than_any_server_is_split_with_one_seed():
    async with run_gateway(3, server_options={"max_sessions": 4}) as (gateway, servers):
        opened_sessions = await get_sessions(gateway).open_group(OpenArgs(), 10)
        assert len({session.session_id for session in opened_sessions}) == 10
        assert len({session.first_result.observation_json for session in opened_sessions}) == 1
        assert sorted(server.core.load.num_sessions for server in servers) == [2, 4, 4]


async def test_group_opens_all_sessions_or_none():
    limits = {"queue_timeout_s": 0.3, "max_group_size": 100}
    options = {"max_sessions": 4}
    async with run_gateway(2, server_options=options, sessions=limits) as (gateway, servers):
        sessions = get_sessions(gateway)
        await sessions.open(OPEN_ARGS)
        with pytest.raises(CapacityError):
            await sessions.open_group(OPEN_ARGS, 8)
        assert count_sessions(servers) == 1
        await wait_until(lambda: not sessions.admission.count_missing(7))
        assert len(await sessions.open_group(OPEN_ARGS, 7)) == 7
        with pytest.raises(InvalidCallError, match="1 to 100 sessions, got 101"):
            await sessions.open_group(OPEN_ARGS, 101)
        with pytest.raises(InvalidCallError, match="the gateway chooses"):
            await sessions.open_group(OPEN_ARGS, 1, session_ids=["mine"])


class OffsetEnv(CountingEnv):
    """An environment that adds an offset to the seed."""

    seed_offset = 0

    def reset(self, *, seed: int | None = None, start: int = 0, note: str = ""):
        return super().reset(seed=(seed or 0) + self.seed_offset, start=start, note=note)


class OtherOffsetEnv(OffsetEnv):
    seed_offset = 1


async def test_group_with_different_initial_observations_is_refused_and_closed():
    first_server = make_server(OffsetEnv, max_sessions=3)
    second_server = make_server(OtherOffsetEnv, max_sessions=3)
    async with first_server, second_server, make_gateway(first_server, second_server) as gateway:
        with pytest.raises(GroupMismatchError, match="2 servers"):
            await get_sessions(gateway).open_group(OPEN_ARGS, 5)
        await wait_until(lambda: count_sessions([first_server, second_server]) == 0)
        await wait_until(lambda: get_sessions(gateway).load.num_sessions == 0)


# -- draining ----------------------------------------------------------------------------


@pytest.mark.slow
async def test_draining_server_keeps_sessions_but_gets_no_new_sessions():
    async with run_gateway(2) as (gateway, servers):
        sessions = get_sessions(gateway)
        old_sessions = [await sessions.open(OPEN_ARGS) for _ in range(10)]
        num_old_sessions = servers[0].core.load.num_sessions
        assert 0 < num_old_sessions < 10
        servers[0].core.drain()
        await wait_until(lambda: get_capacity(gateway) == 256)
        for _ in range(10):
            await sessions.open(OPEN_ARGS)
        assert servers[0].core.load.num_sessions == num_old_sessions
        assert sessions.environment_load.num_draining == num_old_sessions
        for session in old_sessions:
            assert (await sessions.step(session.session_id, b'{"add": 1}', 1)).reward == 1.0


@pytest.mark.slow
async def test_terminating_endpoint_keeps_sessions_but_gets_no_new_sessions():
    async with make_server() as first_server, make_server() as second_server:
        source = ListedServers(make_endpoint(first_server), make_endpoint(second_server))
        async with Gateway(make_config(first_server.grpc_address), {NAME: source}) as gateway:
            sessions = get_sessions(gateway)
            old_sessions = [await sessions.open(OPEN_ARGS) for _ in range(8)]
            num_old_sessions = first_server.core.load.num_sessions
            source.list(
                make_endpoint(first_server, is_terminating=True), make_endpoint(second_server)
            )
            for _ in range(8):
                await sessions.open(OPEN_ARGS)
            assert first_server.core.load.num_sessions == num_old_sessions
            for session in old_sessions:
                await sessions.step(session.session_id, b'{"add": 1}', 1)
            source.list(make_endpoint(second_server))
            num_lost = 0
            for session in old_sessions:
                try:
                    await sessions.step(session.session_id, b'{"add": 1}', 2)
                except EnvError as error:
                    assert error.code == "SESSION_LOST"
                    assert "removed" in error.message
                    num_lost += 1
            assert num_lost == num_old_sessions


@pytest.mark.slow
async def test_draining_gateway_refuses_waiting_opens_and_finishes_sessions():
    async with run_gateway(server_options=SMALL_SERVER_OPTIONS) as (gateway, _):
        sessions = get_sessions(gateway)
        held_sessions = [await sessions.open(OPEN_ARGS) for _ in range(2)]
        open_task = asyncio.create_task(sessions.open(OPEN_ARGS))
        await wait_until(lambda: sessions.load.num_waiting == 1)
        async with httpx.AsyncClient(timeout=60) as http_client:
            assert (await http_client.get(f"{gateway.http_address}/drain")).status_code == 405
            drain_response = await http_client.post(f"{gateway.http_address}/drain")
            assert drain_response.json() == {"is_draining": True, "num_sessions": 2}
            assert (await http_client.get(f"{gateway.http_address}/readyz")).status_code == 200
        for task in (open_task, sessions.open(OPEN_ARGS)):
            with pytest.raises(UnavailableError) as error:
                await task
            assert error.value.code == "DRAINING"
        assert gateway.num_sessions == 2
        for session in held_sessions:
            await sessions.step(session.session_id, b'{"add": 1}', 1)
            await sessions.close(session.session_id)
        await wait_until(lambda: gateway.num_sessions == 0)


# -- release of sessions -----------------------------------------------------------------


@pytest.mark.slow
async def test_sessions_of_a_lost_client_end_after_the_linger_time():
    async with run_gateway(2, sessions={"linger_s": 0.3}) as (gateway, servers):
        sessions = get_sessions(gateway)
        connection = Connection()
        opened_sessions = [await sessions.open(OPEN_ARGS, connection) for _ in range(10)]
        sessions.release(connection)
        await wait_until(lambda: count_sessions(servers) == 0)
        for session in opened_sessions:
            tombstones = [server.core.tombstones.find(session.session_id) for server in servers]
            (tombstone,) = filter(None, tombstones)
            assert tombstone.reason == "the connection that opened it ended 0.3 s ago"


@pytest.mark.slow
async def test_session_is_removed_when_the_server_closes_it_as_idle():
    async with (
        make_server(idle_timeout_s=3600) as long_timeout_server,
        make_server(idle_timeout_s=60) as short_timeout_server,
    ):
        source = ListedServers(
            make_endpoint(long_timeout_server), make_endpoint(short_timeout_server)
        )
        config = make_config("grpc://unused:1", sessions={"linger_s": 0.3})
        async with Gateway(config, {NAME: source}) as gateway:
            sessions = get_sessions(gateway)
            await wait_until(lambda: sessions.environment_load.num_servers == 2)
            opened_sessions = [await sessions.open(OPEN_ARGS) for _ in range(10)]
            num_long_timeout_sessions = long_timeout_server.core.load.num_sessions
            assert 0 < num_long_timeout_sessions < 10
            for session in opened_sessions:
                sessions.tracked_sessions.get(session.session_id).last_used_s -= 700
            await wait_until(lambda: gateway.num_sessions < 10)
            assert gateway.num_sessions == num_long_timeout_sessions


async def test_gateway_idle_limit_applies_if_the_server_has_no_idle_limit():
    limits = {"linger_s": 0.3, "idle_timeout_s": 1000.0}
    async with run_gateway(1, sessions=limits) as (gateway, _):
        sessions = get_sessions(gateway)
        recent_session, idle_session = [await sessions.open(OPEN_ARGS) for _ in range(2)]
        link = sessions.tracked_sessions.get(recent_session.session_id).link
        link.description = dataclasses.replace(link.description, idle_timeout_s=0.0)
        sessions.tracked_sessions.get(recent_session.session_id).last_used_s -= 700
        sessions.tracked_sessions.get(idle_session.session_id).last_used_s -= 1100
        await wait_until(lambda: gateway.num_sessions < 2)
        assert sessions.tracked_sessions.get(recent_session.session_id) is not None


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_session_with_a_call_longer_than_the_idle_limit_is_not_idle(wire, tmp_path):
    gate = Gate(tmp_path)
    async with (
        run_gateway(1, factory=gate.factory, sessions={"linger_s": 0.3}) as (gateway, _),
        await AsyncEnvClient.connect(
            gateway.grpc_address if wire != "http" else f"{gateway.http_address}/envs/{NAME}"
        ) as client,
    ):
        sessions = get_sessions(gateway)
        session, _ = await client.open(seed=1)
        call = asyncio.ensure_future(session.step({"add": 98}))
        await wait_until(lambda: gate.num_entered)
        await sessions.open(OPEN_ARGS)
        for tracked_session in sessions.tracked_sessions:
            tracked_session.last_used_s -= 10_000
        await wait_until(lambda: gateway.num_sessions == 1)
        gate.open()
        await call
        assert (await session.step({"add": 1})).reward == 1.0


async def test_sessions_without_linger_end_with_the_connection():
    async with run_gateway(2, sessions={"linger_s": 0.0}) as (gateway, servers):
        sessions = get_sessions(gateway)
        connection = Connection()
        for _ in range(10):
            await sessions.open(OPEN_ARGS, connection)
        sessions.release(connection)
        assert gateway.num_sessions == 0
        await wait_until(lambda: count_sessions(servers) == 0)


@pytest.mark.long
@pytest.mark.slow
async def test_thousand_lost_clients_leave_no_sessions():
    async with run_gateway(2, sessions={"linger_s": 3}) as (gateway, servers):
        address = gateway.http_address.replace("http", "ws")

        async def abort_socket(number: int) -> None:
            socket = await websockets.connect(f"{address}/envs/{NAME}/ws")
            if number % 2:
                await socket.send(json.dumps({"type": "reset", "data": {"seed": number}}))
            if number % 4 == 1:
                await socket.recv()
            socket.transport.abort()

        async def abort_client(number: int) -> None:
            client = await AsyncEnvClient.connect(gateway.grpc_address)
            open_tasks = [asyncio.create_task(client.open(seed=number + n)) for n in range(10)]
            if number % 2:
                await asyncio.gather(*open_tasks)
            else:
                await asyncio.wait(open_tasks, timeout=0.01)
            client.transport.surviving_sessions.clear()  # so that close() closes no session
            await client.close()
            for task in open_tasks:
                task.cancel()
            await asyncio.gather(*open_tasks, return_exceptions=True)

        for start in range(0, 500, 50):
            await asyncio.gather(*(abort_socket(n) for n in range(start, start + 50)))
        for start in range(0, 50, 10):
            await asyncio.gather(*(abort_client(n) for n in range(start, start + 10)))
        await wait_until(lambda: count_sessions(servers) == 0)
        sessions = get_sessions(gateway)
        await wait_until(lambda: sessions.load.num_sessions == 0)
        await wait_until(lambda: gateway.num_sessions == 0)

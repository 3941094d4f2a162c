"""Admission, waiting and refusal of opens, and release of everything they used."""

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

SEEDED = OpenArgs(ResetArgs(seed=1))
SMALL = {"max_sessions": 2}


def fleet_size(gateway: Gateway) -> int:
    return get_sessions(gateway).environment_load.capacity


async def test_full_fleet_without_queue_refuses_with_a_retry_delay():
    limits = {"queue_timeout_s": 0.0}
    async with run_gateway(2, server_options=SMALL, sessions=limits) as (gateway, servers):
        sessions = get_sessions(gateway)
        for _ in range(4):
            await sessions.open(SEEDED)
        with pytest.raises(CapacityError, match="4/4") as caught:
            await sessions.open(SEEDED)
        assert caught.value.retry_after_s > 0
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"{gateway.http_address}/envs/{NAME}/reset", json={})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        assert count_sessions(servers) == 4


async def test_waiting_opens_are_admitted_in_order_of_arrival():
    async with run_gateway(server_options=SMALL) as (gateway, _):
        sessions = get_sessions(gateway)
        num_held = [await sessions.open(SEEDED) for _ in range(2)]
        admitted: list[int] = []

        async def wait(number: int) -> None:
            opened = await sessions.open(SEEDED)
            admitted.append(number)
            await sessions.close(opened.session_id)

        waiting = []
        for number in range(8):
            waiting.append(asyncio.create_task(wait(number)))
            await wait_until(lambda number=number: sessions.load.num_waiting == number + 1)
        await sessions.close(num_held[0].session_id)
        await asyncio.gather(*waiting)
        assert admitted == list(range(8))


async def test_the_queue_is_bounded_in_length():
    limits = {"queue_size": 2, "queue_timeout_s": 600}
    async with run_gateway(server_options=SMALL, sessions=limits) as (gateway, servers):
        sessions = get_sessions(gateway)
        for _ in range(2):
            await sessions.open(SEEDED)
        waiting = [asyncio.create_task(sessions.open(SEEDED)) for _ in range(2)]
        await wait_until(lambda: sessions.load.num_waiting == 2)
        with pytest.raises(CapacityError):
            await asyncio.wait_for(sessions.open(SEEDED), 60)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert sessions.load.num_waiting == 0
        assert count_sessions(servers) == 2


async def test_the_queue_is_bounded_in_time():
    limits = {"queue_timeout_s": 0.3}
    async with run_gateway(server_options=SMALL, sessions=limits) as (gateway, servers):
        sessions = get_sessions(gateway)
        for _ in range(2):
            await sessions.open(SEEDED)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        with pytest.raises(CapacityError):
            await asyncio.wait_for(sessions.open(SEEDED), 60)
        assert loop.time() - started_s > 0.25
        assert sessions.load.num_waiting == 0
        assert count_sessions(servers) == 2


async def test_a_group_that_waits_counts_with_all_its_sessions():
    """A group counts with all its sessions, so that autoscaling adds enough servers."""
    async with run_gateway(server_options=SMALL) as (gateway, _):
        sessions = get_sessions(gateway)
        waiting = asyncio.create_task(sessions.open_group(SEEDED, 5))
        await wait_until(lambda: sessions.load.num_waiting == 5)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert sessions.load.num_waiting == 0


async def test_a_session_that_ends_on_the_server_itself_admits_who_waits():
    async with run_gateway(server_options=SMALL) as (gateway, servers):
        sessions = get_sessions(gateway)
        num_held = [await sessions.open(SEEDED) for _ in range(2)]
        waiting = asyncio.create_task(sessions.open(SEEDED))
        await wait_until(lambda: sessions.load.num_waiting == 1)
        await servers[0].core.close(num_held[0].session_id)
        await asyncio.wait_for(waiting, 60)


async def test_a_session_that_takes_long_to_begin_is_counted_once():
    may_begin = threading.Event()

    class SlowEnv(ThreadedCountingEnv):
        def reset(self, **fields):
            if not fields.get("start"):
                may_begin.wait()
            return super().reset(**fields)

    async with run_gateway(factory=SlowEnv, server_options={"max_sessions": 5}) as (
        gateway,
        servers,
    ):
        sessions = get_sessions(gateway)
        opening = [asyncio.create_task(sessions.open(SEEDED)) for _ in range(4)]
        try:
            await wait_until(lambda: count_sessions(servers) == 4)
            # The gateway learns only from a poll about a session that it did not open.
            await servers[0].core.open(OpenArgs(ResetArgs(options={"start": 1})))
            await wait_until(lambda: sessions.environment_load.num_active != 4)
            assert sessions.environment_load.num_active == 5
        finally:
            may_begin.set()
        opened = await asyncio.gather(*opening)
        assert sessions.environment_load.num_active == 5
        await sessions.close(opened[0].session_id)
        assert sessions.environment_load.num_active == 4


async def test_cancelled_open_leaves_no_session():
    async with run_gateway(factory=ThreadedCountingEnv) as (gateway, servers):
        sessions = get_sessions(gateway)
        for _ in range(20):
            opening = asyncio.create_task(sessions.open(SEEDED))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        await asyncio.sleep(0.2)
        await wait_until(lambda: count_sessions(servers) == 0)
        await wait_until(lambda: gateway.num_sessions == 0)
        await wait_until(lambda: sessions.load.num_sessions == 0)


@pytest.mark.slow
async def test_two_gateways_do_not_overbook_shared_servers():
    options = {"max_sessions": 10}
    limits = {"queue_timeout_s": 1.0}
    async with (
        run_gateway(2, server_options=options, sessions=limits) as (first, servers),
        make_gateway(*servers, sessions=limits) as second,
    ):
        outcomes = await asyncio.gather(
            *(get_sessions(opened_session).open(SEEDED) for opened_session in (first, second) * 15),
            return_exceptions=True,
        )
        refused = [
            opened_session
            for opened_session in outcomes
            if isinstance(opened_session, BaseException)
        ]
        assert len(outcomes) - len(refused) == 20
        assert all(isinstance(opened_session, CapacityError) for opened_session in refused)
        assert [opened_session.core.load.num_sessions for opened_session in servers] == [10, 10]


async def test_an_open_that_many_full_servers_refuse_waits_until_its_deadline():
    options = {"max_sessions": 1}
    limits = {"queue_timeout_s": 60.0}
    rarely_polled = FAST_POLLING | {"poll_interval_s": 3600.0}
    async with (
        run_gateway(10, server_options=options, sessions=limits, servers=rarely_polled) as (
            unaware,
            servers,
        ),
        make_gateway(*servers) as other,
    ):
        opened = [await get_sessions(other).open(SEEDED) for _ in servers]
        waiting = asyncio.create_task(get_sessions(unaware).open(SEEDED))
        await wait_until(lambda: waiting.done() or get_sessions(unaware).admission.num_waiting)
        assert not waiting.done()
        await get_sessions(other).close(opened[0].session_id)
        assert (await waiting).first_result is not None
        assert count_sessions(servers) == 10


async def test_sessions_are_spread_evenly():
    async with run_gateway(4) as (gateway, servers):
        sessions = get_sessions(gateway)
        await asyncio.gather(*(sessions.open(SEEDED) for _ in range(200)))
        loads = [server.core.load.num_sessions for server in servers]
        assert sum(loads) == 200
        assert max(loads) - min(loads) <= 20, loads


# -- groups ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_group_larger_than_any_server_is_split_with_one_seed():
    async with run_gateway(3, server_options={"max_sessions": 4}) as (gateway, servers):
        opened = await get_sessions(gateway).open_group(OpenArgs(), 10)
        assert len({opened_session.session_id for opened_session in opened}) == 10
        assert len({opened_session.first_result.observation_json for opened_session in opened}) == 1
        assert sorted(server.core.load.num_sessions for server in servers) == [2, 4, 4]


async def test_a_group_gets_all_its_sessions_or_none():
    limits = {"queue_timeout_s": 0.3, "max_group_size": 100}
    options = {"max_sessions": 4}
    async with run_gateway(2, server_options=options, sessions=limits) as (gateway, servers):
        sessions = get_sessions(gateway)
        await sessions.open(SEEDED)
        with pytest.raises(CapacityError):
            await sessions.open_group(SEEDED, 8)
        assert count_sessions(servers) == 1
        await wait_until(lambda: not sessions.admission.count_missing(7))
        assert len(await sessions.open_group(SEEDED, 7)) == 7
        with pytest.raises(InvalidCallError, match="1 to 100 sessions, got 101"):
            await sessions.open_group(SEEDED, 101)
        with pytest.raises(InvalidCallError, match="the gateway chooses"):
            await sessions.open_group(SEEDED, 1, session_ids=["mine"])


class LuckyEnv(CountingEnv):
    """An environment whose first observation differs for the same seed."""

    luck = 0

    def reset(self, *, seed: int | None = None, start: int = 0, note: str = ""):
        return super().reset(seed=(seed or 0) + self.luck, start=start, note=note)


class LuckierEnv(LuckyEnv):
    luck = 1


async def test_a_group_over_servers_that_begin_differently_is_refused_and_closed():
    opened_session = make_server(LuckyEnv, max_sessions=3)
    other = make_server(LuckierEnv, max_sessions=3)
    async with opened_session, other, make_gateway(opened_session, other) as gateway:
        with pytest.raises(GroupMismatchError, match="2 servers"):
            await get_sessions(gateway).open_group(SEEDED, 5)
        await wait_until(lambda: count_sessions([opened_session, other]) == 0)
        await wait_until(lambda: get_sessions(gateway).load.num_sessions == 0)


# -- draining ----------------------------------------------------------------------------


async def test_a_draining_server_finishes_its_sessions_while_new_ones_go_elsewhere():
    async with run_gateway(2) as (gateway, servers):
        sessions = get_sessions(gateway)
        old = [await sessions.open(SEEDED) for _ in range(10)]
        previous = servers[0].core.load.num_sessions
        assert 0 < previous < 10
        servers[0].core.drain()
        await wait_until(lambda: fleet_size(gateway) == 256)
        for _ in range(10):
            await sessions.open(SEEDED)
        assert servers[0].core.load.num_sessions == previous
        assert sessions.environment_load.num_draining == previous
        for opened_session in old:
            assert (await sessions.step(opened_session.session_id, b'{"add": 1}', 1)).reward == 1.0


async def test_a_terminating_endpoint_keeps_its_sessions_and_gets_none():
    async with make_server() as opened_session, make_server() as other:
        source = ListedServers(make_endpoint(opened_session), make_endpoint(other))
        async with Gateway(make_config(opened_session.grpc_address), {NAME: source}) as gateway:
            sessions = get_sessions(gateway)
            old = [await sessions.open(SEEDED) for _ in range(8)]
            previous = opened_session.core.load.num_sessions
            source.list(make_endpoint(opened_session, is_terminating=True), make_endpoint(other))
            for _ in range(8):
                await sessions.open(SEEDED)
            assert opened_session.core.load.num_sessions == previous
            for session in old:
                await sessions.step(session.session_id, b'{"add": 1}', 1)
            source.list(make_endpoint(other))
            lost = 0
            for session in old:
                try:
                    await sessions.step(session.session_id, b'{"add": 1}', 2)
                except EnvError as error:
                    assert error.code == "SESSION_LOST"
                    assert "removed" in error.message
                    lost += 1
            assert lost == previous


async def test_draining_gateway_refuses_waiting_opens_and_finishes_sessions():
    async with run_gateway(server_options=SMALL) as (gateway, _):
        sessions = get_sessions(gateway)
        num_held = [await sessions.open(SEEDED) for _ in range(2)]
        waiting = asyncio.create_task(sessions.open(SEEDED))
        await wait_until(lambda: sessions.load.num_waiting == 1)
        async with httpx.AsyncClient(timeout=60) as http:
            assert (await http.get(f"{gateway.http_address}/drain")).status_code == 405
            drained = await http.post(f"{gateway.http_address}/drain")
            assert drained.json() == {"is_draining": True, "num_sessions": 2}
            assert (await http.get(f"{gateway.http_address}/readyz")).status_code == 200
        for opening in (waiting, sessions.open(SEEDED)):
            with pytest.raises(UnavailableError) as caught:
                await opening
            assert caught.value.code == "DRAINING"
        assert gateway.num_sessions == 2
        for opened_session in num_held:
            await sessions.step(opened_session.session_id, b'{"add": 1}', 1)
            await sessions.close(opened_session.session_id)
        await wait_until(lambda: gateway.num_sessions == 0)


# -- leaving nothing behind --------------------------------------------------------------


async def test_sessions_of_a_lost_client_end_after_their_linger():
    async with run_gateway(2, sessions={"linger_s": 0.3}) as (gateway, servers):
        sessions = get_sessions(gateway)
        connection = Connection()
        opened = [await sessions.open(SEEDED, connection) for _ in range(10)]
        sessions.release(connection)
        await wait_until(lambda: count_sessions(servers) == 0)
        for opened_session in opened:
            tombstones = [
                server.core.tombstones.find(opened_session.session_id) for server in servers
            ]
            (tombstone,) = filter(None, tombstones)
            assert tombstone.reason == "the connection that opened it ended 0.3 s ago"


async def test_session_is_removed_when_its_server_ends_it_as_idle():
    async with make_server(idle_timeout_s=3600) as patient, make_server(idle_timeout_s=60) as other:
        source = ListedServers(make_endpoint(patient), make_endpoint(other))
        config = make_config("grpc://unused:1", sessions={"linger_s": 0.3})
        async with Gateway(config, {NAME: source}) as gateway:
            sessions = get_sessions(gateway)
            await wait_until(lambda: sessions.environment_load.num_servers == 2)
            opened = [await sessions.open(SEEDED) for _ in range(10)]
            num_patient = patient.core.load.num_sessions
            assert 0 < num_patient < 10
            for opened_session in opened:
                sessions.tracked_sessions.get(opened_session.session_id).last_used_s -= 700
            await wait_until(lambda: gateway.num_sessions < 10)
            assert gateway.num_sessions == num_patient


async def test_gateway_limit_applies_without_idle_timeout_of_the_server():
    limits = {"linger_s": 0.3, "idle_timeout_s": 1000.0}
    async with run_gateway(1, sessions=limits) as (gateway, _):
        sessions = get_sessions(gateway)
        kept, idle = [await sessions.open(SEEDED) for _ in range(2)]
        link = sessions.tracked_sessions.get(kept.session_id).link
        link.description = dataclasses.replace(link.description, idle_timeout_s=0.0)
        sessions.tracked_sessions.get(kept.session_id).last_used_s -= 700
        sessions.tracked_sessions.get(idle.session_id).last_used_s -= 1100
        await wait_until(lambda: gateway.num_sessions < 2)
        assert sessions.tracked_sessions.get(kept.session_id) is not None


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_a_session_whose_call_takes_longer_than_the_idle_limit_is_not_idle(wire, tmp_path):
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
        await sessions.open(SEEDED)
        for tracked in sessions.tracked_sessions:
            tracked.last_used_s -= 10_000
        await wait_until(lambda: gateway.num_sessions == 1)
        gate.open()
        await call
        assert (await session.step({"add": 1})).reward == 1.0


async def test_without_linger_sessions_end_with_their_connection():
    async with run_gateway(2, sessions={"linger_s": 0.0}) as (gateway, servers):
        sessions = get_sessions(gateway)
        connection = Connection()
        for _ in range(10):
            await sessions.open(SEEDED, connection)
        sessions.release(connection)
        assert gateway.num_sessions == 0
        await wait_until(lambda: count_sessions(servers) == 0)


@pytest.mark.slow
async def test_thousand_lost_clients_leave_no_sessions():
    async with run_gateway(2, sessions={"linger_s": 3}) as (gateway, servers):
        address = gateway.http_address.replace("http", "ws")

        async def rude_socket(number: int) -> None:
            socket = await websockets.connect(f"{address}/envs/{NAME}/ws")
            if number % 2:
                await socket.send(json.dumps({"type": "reset", "data": {"seed": number}}))
            if number % 4 == 1:
                await socket.recv()
            socket.transport.abort()

        async def rude_grpc(number: int) -> None:
            client = await AsyncEnvClient.connect(gateway.grpc_address)
            opening = [asyncio.create_task(client.open(seed=number + n)) for n in range(10)]
            if number % 2:
                await asyncio.gather(*opening)
            else:
                await asyncio.wait(opening, timeout=0.01)
            client.transport.surviving_sessions.clear()  # closes no session
            await client.close()
            for opened_session in opening:
                opened_session.cancel()
            await asyncio.gather(*opening, return_exceptions=True)

        for begin in range(0, 500, 50):
            await asyncio.gather(*(rude_socket(n) for n in range(begin, begin + 50)))
        for begin in range(0, 50, 10):
            await asyncio.gather(*(rude_grpc(n) for n in range(begin, begin + 10)))
        await wait_until(lambda: count_sessions(servers) == 0)
        sessions = get_sessions(gateway)
        await wait_until(lambda: sessions.load.num_sessions == 0)
        await wait_until(lambda: gateway.num_sessions == 0)

"""Routing by session id: through any gateway, after restarts, and only for the tenant."""

import asyncio
import time
from pathlib import Path

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.security.session_ids import SessionKey
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import SessionLostError
from ludus.services.gateway.fleet.sources import ServerEndpoint
from ludus.services.gateway.gateway import Gateway
from tests.env.polling import wait_until
from tests.env.raw_stream import RawStream
from tests.gateway.gateways import (
    KEY,
    NAME,
    ListedServers,
    count_sessions,
    get_sessions,
    make_config,
    make_endpoint,
    make_gateway,
    make_server,
    run_gateway,
)


class Raw(RawStream):
    """Raw calls to a gateway with any session id."""

    def __init__(self, gateway: Gateway, token: str = "") -> None:
        super().__init__(gateway.grpc_address, token)

    async def open(self, **fields) -> str:
        return await super().open(reset=pb.ResetArgs(seed=1), **fields)

    async def step(self, session_id: str, step_index: int = 0) -> float:
        reply = await self.ask(pb.Call(step=_step(session_id, step_index)))
        assert not reply.HasField("error"), reply.error
        return reply.result.reward

    async def failing_step_code(self, session_id: str) -> str:
        """Return the error code of a failing step."""
        reply = await self.ask(pb.Call(step=_step(session_id)))
        return reply.error.code


def _step(session_id: str, step_index: int = 0) -> pb.StepRequest:
    action = b'{"add": 2}'
    return pb.StepRequest(session_id=session_id, action_json=action, step_index=step_index)


async def test_a_session_opened_through_one_gateway_is_played_through_another():
    async with (
        run_gateway(3) as (first, servers),
        make_gateway(*servers) as second,
        Raw(first) as item,
        Raw(second) as other,
    ):
        ids = [await item.open() for _ in range(6)]
        for step_index, raw in ((1, other), (2, item), (3, other)):
            for session_id in ids:
                assert await raw.step(session_id, step_index) == 2.0


@pytest.mark.slow
async def test_call_for_an_unreached_server_can_be_retried():
    unreached = ServerEndpoint("one", "grpc://127.0.0.1:1", "")
    source = ListedServers(unreached)
    async with (
        Gateway(make_config("grpc://unused:1"), {NAME: source}) as gateway,
        Raw(gateway) as raw,
    ):
        session_id = SessionKey(KEY.encode()).sign(NAME, "some-server")
        assert await raw.failing_step_code(session_id) == "UNAVAILABLE"
        source.list()
        assert await raw.failing_step_code(session_id) == "SESSION_LOST"


async def test_forged_ids_are_refused():
    async with run_gateway() as (gateway, _), Raw(gateway) as raw:
        session_id = await raw.open()
        other_key = SessionKey(b"another-key-that-is-long-enough")
        forged = other_key.sign(NAME, session_id.split("~")[1])
        for bad in (forged, session_id[:-1] + "!", "", "nonsense", "a~b~c~d~e~f~g", "~" * 500):
            assert await raw.failing_step_code(bad) == "UNAUTHENTICATED"


async def test_an_expired_id_is_lost_and_says_so():
    key = SessionKey(KEY.encode())
    async with run_gateway() as (gateway, servers), Raw(gateway) as raw:
        server_id = servers[0].core.options.server_id
        assert (
            await raw.failing_step_code(key.sign(NAME, server_id, lifetime_s=-2)) == "SESSION_LOST"
        )


async def test_an_id_that_was_good_expires(monkeypatch: pytest.MonkeyPatch):
    async with run_gateway() as (gateway, _):
        sessions = get_sessions(gateway)
        session_id = SessionKey(KEY.encode()).sign(NAME, "a-server", lifetime_s=60)
        assert sessions.verify_id(session_id).server_id == "a-server"
        late_s = time.time() + 62
        monkeypatch.setattr(time, "time", lambda: late_s)
        for _ in range(2):
            with pytest.raises(SessionLostError, match="expired"):
                sessions.verify_id(session_id)


async def test_id_of_another_environment_is_refused():
    async with run_gateway() as (gateway, servers), Raw(gateway) as raw:
        signed = SessionKey(KEY.encode()).sign("cards", servers[0].core.options.server_id)
        assert await raw.failing_step_code(signed) == "VALIDATION_ERROR"


async def test_an_id_cannot_be_opened_twice():
    async with run_gateway() as (gateway, servers):
        signed = SessionKey(KEY.encode()).sign(NAME, servers[0].core.options.server_id)
        async with RawStream(servers[0].grpc_address) as raw:
            assert await raw.open(session_id=signed) == signed
            again = await raw.ask(pb.Call(open=pb.OpenRequest(session_id=signed)))
            assert again.error.code == "SESSION_LOST"
            forged = SessionKey(b"another-key-that-is-long-enough").sign(NAME, "somewhere")
            refused = await raw.ask(pb.Call(open=pb.OpenRequest(session_id=forged)))
            assert refused.error.code == "UNAUTHENTICATED"
        async with RawStream(gateway.grpc_address) as raw:
            refused = await raw.ask(pb.Call(open=pb.OpenRequest(session_id=signed)))
            assert "the gateway chooses it" in refused.error.message


RED, BLUE = "red-token-0123456789", "blue-token-0123456789"
TENANTS = """
[[tenants]]
name = "red"
token_env = "RED_TOKEN"
max_sessions = 2

[[tenants]]
name = "blue"
token_env = "BLUE_TOKEN"
"""


@pytest.fixture
def tenants(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.setenv("RED_TOKEN", RED)
    monkeypatch.setenv("BLUE_TOKEN", BLUE)
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    return str(path)


async def test_a_tenants_sessions_are_closed_to_other_tenants(tenants):
    async with run_gateway(tenants_file=tenants) as (gateway, _), Raw(gateway, RED) as red:
        session_id = await red.open()
        assert session_id.split("~")[2] == "red"
        async with Raw(gateway, BLUE) as blue:
            assert await blue.failing_step_code(session_id) == "PERMISSION_DENIED"
        assert await red.step(session_id) == 2.0


async def test_every_end_of_a_session_releases_quota(tenants):
    async with run_gateway(tenants_file=tenants, sessions={"linger_s": 0.5}) as (gateway, servers):
        address = gateway.grpc_address
        client = await AsyncEnvClient.connect(address, ConnectOptions(token=RED))
        await client.open(seed=1)
        done, _ = await client.open(seed=1, close_when_done=True)
        with pytest.raises(Exception, match="may have at most 2"):
            await client.open(seed=1)
        for _ in range(5):
            await done.step({"add": 1})
        closed, _ = await client.open(seed=1)
        await closed.close()
        lost, _ = await client.open(seed=1)
        for server in servers:
            await server.core.close(lost.id)
        with pytest.raises(Exception, match="gone"):
            await lost.step({"add": 1})
        await client.open(seed=1)
        await client.close()
        await wait_until(lambda: count_sessions(servers) == 0)
        await wait_until(lambda: gateway.num_sessions == 0)
        async with await AsyncEnvClient.connect(address, ConnectOptions(token=RED)) as again:
            await again.open(seed=1)
            await again.open(seed=1)


@pytest.mark.parametrize("graceful", [True, False])
async def test_a_client_plays_on_when_its_gateway_restarts(graceful):
    async with make_server() as server:
        gateway = make_gateway(server)
        await gateway.start()
        port = int(gateway.grpc_address.rpartition(":")[2])
        client = await AsyncEnvClient.connect(gateway.grpc_address)
        session, _ = await client.open(seed=7)
        assert (await session.step({"add": 1})).observation["total"] == 1
        if graceful:
            await gateway.stop()
        else:
            await gateway.grpc_server.stop(grace=0)
            await get_sessions(gateway).fleet.close("it was killed")
        await wait_until(lambda: server.core.load.num_sessions == 1)
        playing = asyncio.create_task(session.step({"add": 2}))
        again = Gateway(make_config(server.grpc_address, grpc_port=port))
        await again.start()
        try:
            result = await asyncio.wait_for(playing, 60)
            assert (result.observation["total"], result.step_index) == (3, 2)
            assert (await session.step({"add": 3})).observation["total"] == 6
            await client.close()
            await wait_until(lambda: server.core.load.num_sessions == 0)
        finally:
            await again.stop()
            if not graceful:
                await gateway.stop()


async def test_sessions_without_calls_after_a_restart_end_after_their_linger():
    async with make_server() as server:
        async with (
            make_gateway(server, sessions={"linger_s": 0.3}) as gateway,
            Raw(gateway) as raw,
        ):
            ids = [await raw.open() for _ in range(2)]
        await wait_until(lambda: server.core.load.num_sessions == 0)
        for item in ids:
            ended = server.core.tombstones.find(item)
            assert ended.reason == "the connection that opened it ended 0.3 s ago"


async def test_call_after_the_start_waits_for_the_first_list_of_servers(monkeypatch):
    monkeypatch.setattr("ludus.services.gateway.sessions.sessions.FIND_TIMEOUT_S", 60.0)
    is_known = asyncio.Event()

    class LateSource:
        async def watch(self, publish):
            await is_known.wait()
            publish([make_endpoint(server)])
            await asyncio.Event().wait()

        async def close(self):
            pass

    async with make_server() as server, make_gateway(server) as first, Raw(first) as raw:
        session_id = await raw.open()
        late = Gateway(make_config(server.grpc_address), {NAME: LateSource()})
        starting = asyncio.create_task(late.start())
        await wait_until(lambda: late.grpc_address)
        assert not late.environments.is_ready
        async with Raw(late) as other:
            stepping = asyncio.create_task(other.step(session_id))
            await asyncio.wait([stepping], timeout=0.05)
            assert not stepping.done()
            is_known.set()
            assert await stepping == 2.0
        await starting
        assert late.environments.is_ready
        await late.stop()

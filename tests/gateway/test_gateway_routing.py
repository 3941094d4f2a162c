"""Routing of calls by session id, across gateways, restarts and tenants."""

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


class RawGatewayStream(RawStream):
    """A raw gRPC stream to a gateway, for calls with arbitrary session ids."""

    def __init__(self, gateway: Gateway, token: str = "") -> None:
        super().__init__(gateway.grpc_address, token)

    async def open(self, **fields) -> str:
        return await super().open(reset=pb.ResetArgs(seed=1), **fields)

    async def step(self, session_id: str, step_index: int = 0) -> float:
        reply = await self.ask(pb.Call(step=_make_step_request(session_id, step_index)))
        assert not reply.HasField("error"), reply.error
        return reply.result.reward

    async def send_failing_step(self, session_id: str) -> str:
        """Send a step that fails, and return the error code."""
        reply = await self.ask(pb.Call(step=_make_step_request(session_id)))
        return reply.error.code


def _make_step_request(session_id: str, step_index: int = 0) -> pb.StepRequest:
    action = b'{"add": 2}'
    return pb.StepRequest(session_id=session_id, action_json=action, step_index=step_index)


@pytest.mark.slow
async def test_session_opened_through_one_gateway_works_through_another():
    async with (
        run_gateway(3) as (first_gateway, servers),
        make_gateway(*servers) as second_gateway,
        RawGatewayStream(first_gateway) as first_stream,
        RawGatewayStream(second_gateway) as second_stream,
    ):
        session_ids = [await first_stream.open() for _ in range(6)]
        for step_index, stream in ((1, second_stream), (2, first_stream), (3, second_stream)):
            for session_id in session_ids:
                assert await stream.step(session_id, step_index) == 2.0


@pytest.mark.slow
async def test_call_to_an_unreachable_server_can_be_retried():
    unreachable_endpoint = ServerEndpoint("one", "grpc://127.0.0.1:1", "")
    source = ListedServers(unreachable_endpoint)
    async with (
        Gateway(make_config("grpc://unused:1"), {NAME: source}) as gateway,
        RawGatewayStream(gateway) as stream,
    ):
        session_id = SessionKey(KEY.encode()).sign(NAME, "some-server")
        assert await stream.send_failing_step(session_id) == "UNAVAILABLE"
        source.list()
        assert await stream.send_failing_step(session_id) == "SESSION_LOST"


async def test_forged_and_malformed_session_ids_are_refused():
    async with run_gateway() as (gateway, _), RawGatewayStream(gateway) as stream:
        session_id = await stream.open()
        other_key = SessionKey(b"another-key-that-is-long-enough")
        forged_id = other_key.sign(NAME, session_id.split("~")[1])
        for bad_id in (
            forged_id,
            session_id[:-1] + "!",
            "",
            "nonsense",
            "a~b~c~d~e~f~g",
            "~" * 500,
        ):
            assert await stream.send_failing_step(bad_id) == "UNAUTHENTICATED"


async def test_expired_session_id_returns_session_lost():
    key = SessionKey(KEY.encode())
    async with run_gateway() as (gateway, servers), RawGatewayStream(gateway) as stream:
        server_id = servers[0].core.options.server_id
        assert (
            await stream.send_failing_step(key.sign(NAME, server_id, lifetime_s=-2))
            == "SESSION_LOST"
        )


async def test_verified_session_id_expires(monkeypatch: pytest.MonkeyPatch):
    async with run_gateway() as (gateway, _):
        sessions = get_sessions(gateway)
        session_id = SessionKey(KEY.encode()).sign(NAME, "a-server", lifetime_s=60)
        assert sessions.verify_id(session_id).server_id == "a-server"
        future_s = time.time() + 62
        monkeypatch.setattr(time, "time", lambda: future_s)
        for _ in range(2):
            with pytest.raises(SessionLostError, match="expired"):
                sessions.verify_id(session_id)


async def test_session_id_of_another_environment_is_refused():
    async with run_gateway() as (gateway, servers), RawGatewayStream(gateway) as stream:
        signed_id = SessionKey(KEY.encode()).sign("cards", servers[0].core.options.server_id)
        assert await stream.send_failing_step(signed_id) == "VALIDATION_ERROR"


async def test_session_id_cannot_be_opened_twice():
    async with run_gateway() as (gateway, servers):
        signed_id = SessionKey(KEY.encode()).sign(NAME, servers[0].core.options.server_id)
        async with RawStream(servers[0].grpc_address) as stream:
            assert await stream.open(session_id=signed_id) == signed_id
            second_reply = await stream.ask(pb.Call(open=pb.OpenRequest(session_id=signed_id)))
            assert second_reply.error.code == "SESSION_LOST"
            other_key = SessionKey(b"another-key-that-is-long-enough")
            forged_id = other_key.sign(NAME, servers[0].core.options.server_id)
            refused_reply = await stream.ask(pb.Call(open=pb.OpenRequest(session_id=forged_id)))
            assert refused_reply.error.code == "UNAUTHENTICATED"
        async with RawStream(gateway.grpc_address) as stream:
            refused_reply = await stream.ask(pb.Call(open=pb.OpenRequest(session_id=signed_id)))
            assert "the gateway chooses it" in refused_reply.error.message


RED_TOKEN, BLUE_TOKEN = "red-token-0123456789", "blue-token-0123456789"
TENANTS_TOML = """
[[tenants]]
name = "red"
token_env = "RED_TOKEN"
max_sessions = 2

[[tenants]]
name = "blue"
token_env = "BLUE_TOKEN"
"""


@pytest.fixture
def tenants_file(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.setenv("RED_TOKEN", RED_TOKEN)
    monkeypatch.setenv("BLUE_TOKEN", BLUE_TOKEN)
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS_TOML)
    return str(path)


async def test_tenant_cannot_use_sessions_of_other_tenants(tenants_file):
    async with (
        run_gateway(tenants_file=tenants_file) as (gateway, _),
        RawGatewayStream(gateway, RED_TOKEN) as red_stream,
    ):
        session_id = await red_stream.open()
        assert session_id.split("~")[2] == "red"
        async with RawGatewayStream(gateway, BLUE_TOKEN) as blue_stream:
            assert await blue_stream.send_failing_step(session_id) == "PERMISSION_DENIED"
        assert await red_stream.step(session_id) == 2.0


@pytest.mark.slow
async def test_ended_sessions_release_the_quota(tenants_file):
    async with run_gateway(tenants_file=tenants_file, sessions={"linger_s": 0.5}) as (
        gateway,
        servers,
    ):
        address = gateway.grpc_address
        client = await AsyncEnvClient.connect(address, ConnectOptions(token=RED_TOKEN))
        await client.open(seed=1)
        finished_session, _ = await client.open(seed=1, close_when_done=True)
        with pytest.raises(Exception, match="may have at most 2"):
            await client.open(seed=1)
        for _ in range(5):
            await finished_session.step({"add": 1})
        closed_session, _ = await client.open(seed=1)
        await closed_session.close()
        lost_session, _ = await client.open(seed=1)
        for server in servers:
            await server.core.close(lost_session.id)
        with pytest.raises(Exception, match="gone"):
            await lost_session.step({"add": 1})
        await client.open(seed=1)
        await client.close()
        await wait_until(lambda: count_sessions(servers) == 0)
        await wait_until(lambda: gateway.num_sessions == 0)
        async with await AsyncEnvClient.connect(
            address, ConnectOptions(token=RED_TOKEN)
        ) as new_client:
            await new_client.open(seed=1)
            await new_client.open(seed=1)


@pytest.mark.parametrize("is_graceful", [True, False])
async def test_client_continues_after_gateway_restart(is_graceful):
    async with make_server() as server:
        gateway = make_gateway(server)
        await gateway.start()
        port = int(gateway.grpc_address.rpartition(":")[2])
        client = await AsyncEnvClient.connect(gateway.grpc_address)
        session, _ = await client.open(seed=7)
        assert (await session.step({"add": 1})).observation["total"] == 1
        if is_graceful:
            await gateway.stop()
        else:
            await gateway.grpc_server.stop(grace=0)
            await get_sessions(gateway).fleet.close("gateway was killed")
        await wait_until(lambda: server.core.load.num_sessions == 1)
        step_task = asyncio.create_task(session.step({"add": 2}))
        new_gateway = Gateway(make_config(server.grpc_address, grpc_port=port))
        await new_gateway.start()
        try:
            result = await asyncio.wait_for(step_task, 60)
            assert (result.observation["total"], result.step_index) == (3, 2)
            assert (await session.step({"add": 3})).observation["total"] == 6
            await client.close()
            await wait_until(lambda: server.core.load.num_sessions == 0)
        finally:
            await new_gateway.stop()
            if not is_graceful:
                await gateway.stop()


@pytest.mark.slow
async def test_sessions_without_calls_end_after_gateway_stop_and_linger():
    async with make_server() as server:
        async with (
            make_gateway(server, sessions={"linger_s": 0.3}) as gateway,
            RawGatewayStream(gateway) as stream,
        ):
            session_ids = [await stream.open() for _ in range(2)]
        await wait_until(lambda: server.core.load.num_sessions == 0)
        for session_id in session_ids:
            tombstone = server.core.tombstones.find(session_id)
            assert tombstone.reason == "the connection that opened it ended 0.3 s ago"


async def test_first_call_waits_for_the_first_server_list(monkeypatch):
    monkeypatch.setattr("ludus.services.gateway.sessions.sessions.FIND_TIMEOUT_S", 60.0)
    list_event = asyncio.Event()

    class LateSource:
        async def watch(self, publish):
            await list_event.wait()
            publish([make_endpoint(server)])
            await asyncio.Event().wait()

        async def close(self):
            pass

    async with (
        make_server() as server,
        make_gateway(server) as first_gateway,
        RawGatewayStream(first_gateway) as stream,
    ):
        session_id = await stream.open()
        late_gateway = Gateway(make_config(server.grpc_address), {NAME: LateSource()})
        start_task = asyncio.create_task(late_gateway.start())
        await wait_until(lambda: late_gateway.grpc_address)
        assert not late_gateway.environments.is_ready
        async with RawGatewayStream(late_gateway) as second_stream:
            step_task = asyncio.create_task(second_stream.step(session_id))
            await asyncio.wait([step_task], timeout=0.05)
            assert not step_task.done()
            list_event.set()
            assert await step_task == 2.0
        await start_task
        assert late_gateway.environments.is_ready
        await late_gateway.stop()

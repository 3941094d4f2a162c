"""Servers that a gateway starts, replaces and stops."""

import os
import signal

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.encoding import ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.proto.errors import InfrastructureError, UserError
from ludus.services.gateway.config import GatewayConfig
from ludus.services.gateway.gateway import Gateway
from tests.env.polling import wait_until
from tests.gateway.gateways import NAME, get_sessions

pytestmark = pytest.mark.slow

OPEN_ARGS = OpenArgs(ResetArgs(seed=1))


def make_config(**fields) -> GatewayConfig:
    environment = {
        "kind": "subprocess",
        "target": "openspiel_env",
        "options": {"game": "blackjack"},
        **fields,
    }
    servers = {"poll_interval_s": 0.1, "retry_within_s": 60.0, "unreachable_after_s": 60.0}
    return GatewayConfig.parse({"environments": {NAME: environment}, "port": 0, "servers": servers})


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_dead_servers_are_replaced_and_stop_with_the_gateway():
    async with Gateway(make_config(num_servers=2, max_sessions=4)) as gateway:
        sessions, source = get_sessions(gateway), gateway.sources[NAME]
        await wait_until(lambda: sessions.environment_load.capacity == 8)
        opened_sessions = [await sessions.open(OPEN_ARGS) for _ in range(8)]
        os.kill(source.servers["server-1"].pid, signal.SIGKILL)
        num_lost = 0
        for session in opened_sessions:
            try:
                assert await sessions.state(session.session_id)
            except InfrastructureError as error:
                assert error.code == "SESSION_LOST"
                num_lost += 1
        assert num_lost == 4
        await wait_until(lambda: sessions.environment_load.capacity == 8)
        assert len(await sessions.open_group(OpenArgs(), 4)) == 4
        pids = [server.pid for server in source.servers.values()]
        assert len(set(pids)) == 2
    assert not any(is_alive(pid) for pid in pids)


async def test_environment_build_error_is_raised_by_gateway_start(monkeypatch):
    monkeypatch.setattr("ludus.services.gateway.gateway.SETTLE_TIMEOUT_S", 120.0)
    with pytest.raises(UserError, match="nogame"):
        await Gateway(make_config(options={"game": "nogame"})).start()


async def test_started_servers_do_not_inherit_gateway_secrets(tmp_path, monkeypatch):
    secrets = {
        "LUDUS_GATEWAY_TOKEN": "a-token-of-the-gateway-" + "g" * 32,
        "FLEET_TOKEN": "a-token-of-the-servers-" + "s" * 32,
        "LUDUS_ENV_TOKEN": "a-token-of-other-servers-" + "e" * 32,
        "LUDUS_SESSION_KEY": "a-key-of-the-gateway-" + "k" * 32,
        "TEAM_A_TOKEN": "a-token-of-a-tenant-" + "a" * 32,
        "FORGOTTEN_COPY": "a-token-of-a-tenant-" + "a" * 32,
    }
    for name, value in {**secrets, "HARMLESS": "1"}.items():
        monkeypatch.setenv(name, value)
    tenants_file = tmp_path / "tenants.toml"
    tenants_file.write_text('[[tenants]]\nname = "team-a"\ntoken_env = "TEAM_A_TOKEN"\n')
    config = make_config(target="tests.env.code_env:CodeEnv", options={}).model_dump()
    config["servers"]["token_env"] = "FLEET_TOKEN"
    async with Gateway(GatewayConfig.parse({**config, "tenants_file": tenants_file})) as gateway:
        address, token = gateway.grpc_address, secrets["TEAM_A_TOKEN"]
        client = await AsyncEnvClient.connect(address, ConnectOptions(token=token))
        session, _ = await client.open()
        step_info = (await session.step({"code": "import os; result = dict(os.environ)"})).info
        await client.close()
        assert step_info["result"]["HARMLESS"] == "1"
        assert not set(secrets.values()) & set(step_info["result"].values())

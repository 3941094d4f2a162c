"""TLS, tenant scopes, evictions, connection ages and failed starts of a gateway."""

import asyncio
from pathlib import Path

import httpx
import pytest
import trustme

from ludus.env.client import AsyncEnvClient
from ludus.env.encoding import ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.proto.errors import CapacityError, ConfigError, PortInUseError
from ludus.services.gateway.fleet import admission
from ludus.services.gateway.gateway import Gateway
from tests.env.polling import wait_until
from tests.gateway.gateways import (
    FAST_POLLING,
    NAME,
    connect_client,
    count_sessions,
    get_sessions,
    make_config,
    make_http_client,
    make_server,
    run_gateway,
)

pytestmark = pytest.mark.asyncio

RED_TOKEN, BLUE_TOKEN, ROOT_TOKEN = (f"{name}-token-0123456789" for name in ("red", "blue", "root"))


@pytest.fixture
def tenants_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    lines = []
    for name, token, scope in (
        ("red", RED_TOKEN, "step"),
        ("blue", BLUE_TOKEN, "step"),
        ("root", ROOT_TOKEN, "admin"),
    ):
        monkeypatch.setenv(f"{name.upper()}_TOKEN", token)
        lines += ["[[tenants]]", f'name = "{name}"', f'token_env = "{name.upper()}_TOKEN"']
        lines += [f'scopes = ["{scope}"]']
    path = tmp_path / "tenants.toml"
    path.write_text("\n".join(lines))
    return str(path)


def make_headers(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.slow
async def test_tls_works_on_both_ports(tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    cert_file, key_file, ca_file = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    certificate.cert_chain_pems[0].write_to_path(cert_file)
    certificate.private_key_pem.write_to_path(key_file)
    authority.cert_pem.write_to_path(ca_file)
    tls = {"cert": str(cert_file), "key": str(key_file)}
    async with run_gateway(tls=tls) as (gateway, _):
        assert gateway.grpc_address.startswith("grpcs://")
        for address in (gateway.grpc_address, f"{gateway.http_address}/envs/{NAME}"):
            async with connect_client(address, ca_file=str(ca_file)) as client:
                session, _ = await client.open(seed=1)
                assert (await session.step({"add": 2})).reward == 2.0


@pytest.mark.slow
async def test_admin_can_drain_but_not_play_and_tenant_can_play_but_not_drain(tenants_file):
    async with (
        run_gateway(tenants_file=tenants_file) as (gateway, _),
        make_http_client(gateway) as http,
    ):
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/v1/envs")).status_code == 401
        assert (await http.post("/drain", headers=make_headers(RED_TOKEN))).status_code == 403
        reset_path = f"/envs/{NAME}/reset"
        assert (
            await http.post(reset_path, json={}, headers=make_headers(ROOT_TOKEN))
        ).status_code == 403
        assert (
            await http.post(reset_path, json={}, headers=make_headers(RED_TOKEN))
        ).status_code == 200
        assert (await http.post("/drain", headers=make_headers(ROOT_TOKEN))).status_code == 200
        http.cookies.clear()  # without the cookie, the next reset opens a new session
        refusal = await http.post(reset_path, json={}, headers=make_headers(RED_TOKEN))
        assert refusal.json()["detail"]["code"] == "DRAINING"


@pytest.mark.slow
async def test_unused_session_is_evicted_for_another_tenant(tenants_file):
    options = {"max_sessions": 1}
    async with (
        run_gateway(tenants_file=tenants_file, server_options=options) as (gateway, servers),
        make_http_client(gateway) as red_client,
        make_http_client(gateway) as blue_client,
    ):
        reset_path = f"/envs/{NAME}/reset"
        for _ in range(2):
            for http, token in ((red_client, RED_TOKEN), (blue_client, BLUE_TOKEN)):
                response = await http.post(
                    reset_path, json={"seed": 1}, headers=make_headers(token)
                )
                assert response.status_code == 200, response.text
                assert count_sessions(servers) == 1


@pytest.mark.slow
async def test_unused_session_is_evicted_after_an_unexpected_refusal():
    options = {"max_sessions": 2}
    async with (
        run_gateway(server_options=options, servers={**FAST_POLLING, "poll_interval_s": 3600}) as (
            gateway,
            [server],
        ),
        make_http_client(gateway) as first_client,
        make_http_client(gateway) as second_client,
    ):
        reset_path = f"/envs/{NAME}/reset"
        assert (await first_client.post(reset_path, json={})).status_code == 200
        async with connect_client(server.grpc_address) as direct_client:
            await direct_client.open()
            assert count_sessions([server]) == 2
            response = await second_client.post(reset_path, json={})
            assert response.status_code == 200, response.text
            assert count_sessions([server]) == 2


@pytest.mark.slow
async def test_sessions_continue_after_connection_reaches_max_age(monkeypatch):
    monkeypatch.setattr("ludus.env.serving.listeners._AGE_GRACE_MS", 500)
    async with (
        run_gateway(max_connection_age_s=1.0) as (gateway, servers),
        connect_client(gateway) as client,
    ):
        session, _ = await client.open(seed=1)
        stream = client.transport.stream
        await wait_until(lambda: stream.break_reason is not None)
        assert (await session.step({"add": 2})).step_index == 1
        assert count_sessions(servers) == 1


async def test_non_loopback_host_requires_a_token():
    with pytest.raises(ConfigError, match="tenants or a token"):
        Gateway(make_config("grpc://127.0.0.1:1", host="0.0.0.0"))


@pytest.mark.parametrize("field", ["port", "grpc_port"])
async def test_gateway_start_reports_a_port_in_use(field):
    async with run_gateway() as (gateway, _):
        address = gateway.http_address if field == "port" else gateway.grpc_address
        ports = {"port": 0, "grpc_port": 0, field: int(address.rpartition(":")[2])}
        with pytest.raises(PortInUseError, match=f"{field} .* is in use"):
            await Gateway(make_config("grpc://127.0.0.1:1", **ports)).start()


@pytest.mark.slow
async def test_open_requests_without_servers_time_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(admission, "MIN_DESCRIBE_TIMEOUT_S", 0.3)
    limits = {"queue_timeout_s": 0.3}
    async with Gateway(make_config("grpc://127.0.0.1:1", sessions=limits)) as gateway:
        with pytest.raises(CapacityError, match="accepts sessions"):
            await get_sessions(gateway).open(OpenArgs(ResetArgs()))
        async with httpx.AsyncClient(timeout=60) as http:
            response = await http.get(f"{gateway.http_address}/envs/{NAME}/metadata", timeout=30)
            assert response.status_code == 503
            assert response.json()["detail"]["code"] == "UNAVAILABLE"


@pytest.mark.slow
async def test_early_client_is_served_once_a_server_starts():
    server = make_server()
    port = _find_free_port()
    async with Gateway(make_config(f"grpc://127.0.0.1:{port}")) as gateway:
        connection_task = asyncio.create_task(AsyncEnvClient.connect(gateway.grpc_address))
        await wait_until(lambda: get_sessions(gateway).load.num_waiting == 1)
        server = make_server(grpc_port=port)
        async with server, await connection_task as client:
            session, _ = await client.open(seed=1)
            assert (await session.step({"add": 1})).reward == 1.0


def _find_free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]

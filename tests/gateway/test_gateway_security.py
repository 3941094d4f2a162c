"""A gateway with tenants and TLS: authentication, quotas and the admin port."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme
import websockets

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.security.tls import build_client_context
from ludus.proto.errors import AuthenticationError, PortInUseError, RateLimitError
from ludus.services.gateway.gateway import Gateway
from tests.gateway.clock import Clock
from tests.gateway.gateways import FAST_POLLING, NAME, connect_client, make_config, run_gateway

ALICE_TOKEN = "a11ce-a11ce-a11ce-a11ce"
BOB_TOKEN = "b0b-b0b-b0b-b0b-b0b-b0b"


def write_tenants(path: Path, **limits: str) -> None:
    """Write a tenants file with one tenant per keyword and the given TOML limits."""
    tokens = {"alice": ALICE_TOKEN, "bob": BOB_TOKEN}
    path.write_text(
        "".join(
            f'[[tenants]]\nname = "{name}"\n{limits_toml}\n'
            f'token_sha256 = "{hashlib.sha256(tokens[name].encode()).hexdigest()}"\n'
            for name, limits_toml in limits.items()
        )
    )


@pytest.fixture
def ca_file(tmp_path: Path) -> Path:
    ca = trustme.CA()
    cert = ca.issue_cert("localhost", "127.0.0.1")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    cert.private_key_pem.write_to_path(str(tmp_path / "tls.key"))
    (tmp_path / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    return tmp_path / "ca.pem"


@pytest.fixture
async def gateway(tmp_path: Path, ca_file: Path, clock: Clock) -> AsyncIterator[Gateway]:
    write_tenants(tmp_path / "tenants.toml", alice="", bob="")
    tls = {"cert": str(tmp_path / "tls.crt"), "key": str(tmp_path / "tls.key")}
    tenants_file = str(tmp_path / "tenants.toml")
    async with run_gateway(tenants_file=tenants_file, tls=tls, clock=clock) as (gateway, _):
        yield gateway


def make_http_client(gateway: Gateway, ca_file: Path) -> httpx.AsyncClient:
    context = build_client_context(ca_file)
    return httpx.AsyncClient(base_url=gateway.http_address, verify=context, timeout=60)


@pytest.mark.slow
async def test_every_protocol_requires_a_token_over_tls(gateway: Gateway, ca_file: Path) -> None:
    async with make_http_client(gateway, ca_file) as http:
        assert (await http.get("/v1/envs")).status_code == 401
        assert (await http.get("/v1/envs", auth=("alice", ALICE_TOKEN))).status_code == 200
    url = f"{gateway.http_address}/envs/{NAME}/ws".replace("https", "wss")
    context = build_client_context(ca_file)
    with pytest.raises(websockets.InvalidStatus):
        await websockets.connect(url, ssl=context)
    url_with_token = url.replace("://", f"://alice:{ALICE_TOKEN}@")
    async with websockets.connect(url_with_token, ssl=context) as socket:
        await socket.send('{"type": "reset", "data": {}}')
        assert '"observation"' in str(await socket.recv())
    with pytest.raises(AuthenticationError):
        await AsyncEnvClient.connect(gateway.grpc_address, ConnectOptions(ca_file=str(ca_file)))
    async with await AsyncEnvClient.connect(
        gateway.grpc_address, ConnectOptions(token=ALICE_TOKEN, ca_file=str(ca_file))
    ) as client:
        assert (await client.open(seed=1))[1].observation is not None


@pytest.mark.slow
async def test_gateway_connects_to_servers_with_tls_and_token(
    ca_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_SERVERS", "hush")
    options = {"tls_cert": tmp_path / "tls.crt", "tls_key": tmp_path / "tls.key", "token": "hush"}
    server_config = {**FAST_POLLING, "ca_file": str(ca_file), "token_env": "TOKEN_OF_SERVERS"}
    async with (
        run_gateway(2, server_options=options, servers=server_config) as (gateway, servers),
        connect_client(gateway) as client,
    ):
        assert servers[0].grpc_address.startswith("grpcs://")
        sessions = [await client.open(seed=1) for _ in range(2)]
        assert [(await session.step({"add": 1})).reward for session, _ in sessions] == [1.0, 1.0]


@pytest.mark.slow
async def test_changed_tenants_file_applies_to_open_streams(
    gateway: Gateway, ca_file: Path, tmp_path: Path, clock: Clock
) -> None:
    alice_client, bob_client = [
        await AsyncEnvClient.connect(
            gateway.grpc_address, ConnectOptions(token=token, ca_file=str(ca_file))
        )
        for token in (ALICE_TOKEN, BOB_TOKEN)
    ]
    session, _ = await alice_client.open(seed=1)
    bob_session, _ = await bob_client.open(seed=1)
    await session.step({"add": 1})
    write_tenants(tmp_path / "tenants.toml", bob="max_sessions = 1")
    clock.now_s += 1.0
    with pytest.raises(AuthenticationError, match="'alice' was removed"):
        await session.step({"add": 1})
    with pytest.raises(AuthenticationError, match="'alice' was removed"):
        await alice_client.open(seed=1)
    await bob_session.step({"add": 1})
    with pytest.raises(RateLimitError, match="may have at most 1"):
        await bob_client.open(seed=1)
    await alice_client.close()
    await bob_client.close()


@pytest.mark.slow
async def test_metrics_count_refused_steps_of_every_protocol_and_contain_no_secrets(
    gateway: Gateway, ca_file: Path, tmp_path: Path, clock: Clock
) -> None:
    write_tenants(tmp_path / "tenants.toml", alice="steps_per_s = 0.001", bob="")
    clock.now_s += 1.0
    async with (
        make_http_client(gateway, ca_file) as http,
        await AsyncEnvClient.connect(
            gateway.grpc_address, ConnectOptions(token=ALICE_TOKEN, ca_file=str(ca_file))
        ) as client,
    ):
        session, _ = await client.open(seed=1)
        await session.step({"add": 1})
        with pytest.raises(RateLimitError, match="steps per second"):
            await session.step({"add": 1})
        for call in (session.reset(), session.state(), session.call_tool("any", {})):
            with pytest.raises(RateLimitError, match="steps per second"):
                await call
        refusal = await http.post(
            f"/envs/{NAME}/step",
            json={"action": {"add": 1}},
            headers={"x-session-id": session.id},
            auth=("alice", ALICE_TOKEN),
        )
        assert (refusal.status_code, refusal.json()["detail"]["code"]) == (429, "RATE_LIMITED")
        assert int(refusal.headers["retry-after"]) > 100
        headers = {"x-session-id": session.id}
        for method, path in (("GET", "state"), ("POST", "reset")):
            refusal = await http.request(
                method, f"/envs/{NAME}/{path}", headers=headers, auth=("alice", ALICE_TOKEN)
            )
            assert refusal.status_code == 429
        text = (await http.get("/metrics", auth=("bob", BOB_TOKEN))).text
    assert f'ludus_gateway_rate_limited_total{{env="{NAME}"}} 7.0' in text
    for secret in (ALICE_TOKEN, BOB_TOKEN, "alice", "bob", session.id):
        assert secret not in text


@pytest.mark.slow
async def test_admin_port_requires_no_token_and_no_tls(tmp_path: Path, ca_file: Path) -> None:
    write_tenants(tmp_path / "tenants.toml", alice="")
    tls = {"cert": str(tmp_path / "tls.crt"), "key": str(tmp_path / "tls.key")}
    fields = {"tenants_file": str(tmp_path / "tenants.toml"), "tls": tls, "admin_port": 0}
    async with run_gateway(**fields) as (gateway, _), httpx.AsyncClient(timeout=60) as http:
        assert gateway.admin_address.startswith("http://")
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await http.get(gateway.admin_address + path)).status_code == 200
        for path in ("/v1/envs", f"/envs/{NAME}/reset", "/openapi.json"):
            assert (await http.get(gateway.admin_address + path)).status_code == 404
        assert not gateway.environments[NAME].admission.is_draining
        assert (await http.get(gateway.admin_address + "/drain")).status_code == 405
        assert not gateway.environments[NAME].admission.is_draining
        assert (await http.post(gateway.admin_address + "/drain")).status_code == 200
        assert gateway.environments[NAME].admission.is_draining
        async with make_http_client(gateway, ca_file) as tls_client:
            assert (await tls_client.get("/metrics")).status_code == 401


async def test_admin_port_in_use_prevents_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = make_config("grpc://127.0.0.1:1", admin_port=listener.getsockname()[1])
        with pytest.raises(PortInUseError, match="admin_port"):
            await Gateway(config).start()

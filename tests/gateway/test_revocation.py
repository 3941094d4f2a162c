"""Revocation of tenants, tokens and scopes on open connections of every wire."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

from ludus.proto.env.v1 import env_pb2 as pb
from ludus.services.gateway import gateway as gateway_module
from ludus.services.gateway.gateway import Gateway
from tests.env.polling import wait_until
from tests.env.raw_stream import RawStream
from tests.gateway.clock import Clock
from tests.gateway.gateways import NAME, get_sessions, run_gateway

ALICE_TOKEN = "a11ce-a11ce-a11ce-a11ce"
ALICE_SECOND_TOKEN = "a11ce-two-a11ce-two-a11ce"
BOB_TOKEN = "b0b-b0b-b0b-b0b-b0b-b0b"


def write_tenants(path: Path, **entries: tuple[str, str]) -> None:
    """Write a tenants file with one tenant per keyword and the given (token, scope)."""
    path.write_text(
        "".join(
            f'[[tenants]]\nname = "{name}"\nscopes = ["{scope}"]\n'
            f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
            for name, (token, scope) in entries.items()
        )
    )


TENANT_CHANGES = {
    "tenant_removed": ({}, "UNAUTHENTICATED"),
    "token_replaced": ({"alice": (ALICE_SECOND_TOKEN, "step")}, "UNAUTHENTICATED"),
    "token_moved_to_another_tenant": ({"carol": (ALICE_TOKEN, "step")}, "UNAUTHENTICATED"),
    "scope_changed_to_admin": ({"alice": (ALICE_TOKEN, "admin")}, "PERMISSION_DENIED"),
}
"""New (token, scope) entries for the tenant alice, and the resulting error codes."""
REVOCATIONS = [name for name in TENANT_CHANGES if "another" not in name]
"""Names of the changes after which alice's first token cannot be used to play."""
parametrize_change = pytest.mark.parametrize(
    ("entries", "code"), TENANT_CHANGES.values(), ids=TENANT_CHANGES
)


class RevocableGateway:
    """A gateway whose tenants file, with alice and bob, can be replaced by a test."""

    def __init__(self, gateway: Gateway, path: Path, clock: Clock) -> None:
        self.gateway = gateway
        self._path = path
        self._clock = clock

    def replace_tenants(self, entries: dict[str, tuple[str, str]]) -> None:
        write_tenants(self._path, bob=(BOB_TOKEN, "step"), **entries)
        self._clock.now_s += 1.0

    def make_stream(self, token: str) -> RawStream:
        return RawStream(self.gateway.grpc_address, token)

    async def open_socket(self, path: str, token: str) -> ClientConnection:
        url = f"{self.gateway.http_address}/envs/{NAME}{path}".replace("http", "ws", 1)
        return await connect(url, additional_headers={"authorization": f"Bearer {token}"})


@pytest.fixture
async def revocable_gateway(tmp_path: Path, clock: Clock) -> AsyncIterator[RevocableGateway]:
    path = tmp_path / "tenants.toml"
    write_tenants(path, alice=(ALICE_TOKEN, "step"), bob=(BOB_TOKEN, "step"))
    async with run_gateway(tenants_file=str(path), clock=clock) as (gateway, _):
        yield RevocableGateway(gateway, path, clock)


def make_all_calls(session_id: str) -> list[pb.Call]:
    """Return one call of each kind."""
    step = pb.StepRequest(session_id=session_id, action_json=b'{"add": 1}', step_index=1)
    return [
        pb.Call(open=pb.OpenRequest(reset=pb.ResetArgs(seed=1))),
        pb.Call(open_group=pb.OpenGroupRequest(size=2)),
        pb.Call(reset=pb.ResetRequest(session_id=session_id)),
        pb.Call(step=step),
        pb.Call(state=pb.StateRequest(session_id=session_id)),
        pb.Call(call_tool=pb.CallToolRequest(session_id=session_id, name="note")),
        pb.Call(detach=pb.DetachRequest(session_id=session_id)),
        pb.Call(close=pb.CloseRequest(session_id=session_id)),
    ]


@parametrize_change
async def test_every_kind_of_call_on_an_open_stream_is_refused(
    revocable_gateway: RevocableGateway,
    entries: dict[str, tuple[str, str]],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        revocable_gateway.make_stream(ALICE_TOKEN) as stream,
        revocable_gateway.make_stream(ALICE_TOKEN) as second_stream,
    ):
        # The streams stay open, so that the calls on them are checked.
        access = revocable_gateway.gateway.access
        monkeypatch.setattr(access, "close_refused_connections", lambda: None)
        session_id = await stream.open(reset=pb.ResetArgs(seed=1))
        await second_stream.open()
        revocable_gateway.replace_tenants(entries)
        for call in make_all_calls(session_id):
            reply = await second_stream.ask(call)
            assert reply.error.code == code, call.WhichOneof("call")
        assert revocable_gateway.gateway.num_sessions == 2


async def test_refused_close_does_not_count_as_an_ended_session(
    revocable_gateway: RevocableGateway,
) -> None:
    async with (
        revocable_gateway.make_stream(ALICE_TOKEN) as stream,
        revocable_gateway.make_stream(BOB_TOKEN) as bob_stream,
    ):
        session_id = await stream.open(reset=pb.ResetArgs(seed=1))
        reply = await bob_stream.ask(pb.Call(close=pb.CloseRequest(session_id=session_id)))
        assert reply.error.code == "PERMISSION_DENIED"
        links = get_sessions(revocable_gateway.gateway).fleet.links
        assert not any(link.is_used_up for link in links), "its pod would be deleted"


@pytest.mark.slow
@parametrize_change
async def test_only_revoked_connections_are_closed(
    revocable_gateway: RevocableGateway,
    entries: dict[str, tuple[str, str]],
    code: str,
) -> None:
    async with (
        revocable_gateway.make_stream(ALICE_TOKEN) as stream,
        revocable_gateway.make_stream(BOB_TOKEN) as bob_stream,
    ):
        await stream.open()
        await bob_stream.open()
        sockets = [
            await revocable_gateway.open_socket(path, ALICE_TOKEN) for path in ("/ws", "/mcp")
        ]
        bob_sockets = [
            await revocable_gateway.open_socket(path, BOB_TOKEN) for path in ("/ws", "/mcp")
        ]
        revocable_gateway.replace_tenants(entries)
        async with asyncio.timeout(60):
            assert (await stream.call.code()).name == code
            for socket in sockets:
                await socket.wait_closed()
        assert [socket.close_code for socket in sockets] == [1008, 1008]
        reason_words = ("removed", "revoked", "scope")
        reasons = [socket.close_reason or "" for socket in sockets]
        assert all(any(word in reason for word in reason_words) for reason in reasons)
        await bob_stream.open()
        await bob_sockets[0].send('{"type": "reset", "data": {}}')
        assert '"observation"' in str(await bob_sockets[0].recv())
        await bob_sockets[1].send('{"jsonrpc": "2.0", "id": 1, "method": "ping"}')
        assert json.loads(await bob_sockets[1].recv())["result"] == {}
        for socket in bob_sockets:
            await socket.close()


def test_revocation_check_interval_matches_the_documentation() -> None:
    text = Path("docs/security.md").read_text()
    assert "**Within two seconds**" in text
    assert gateway_module.REVOCATION_INTERVAL_S <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "code"), [TENANT_CHANGES[name] for name in REVOCATIONS], ids=REVOCATIONS
)
async def test_plain_http_and_mcp_requests_are_refused(
    revocable_gateway: RevocableGateway, entries: dict[str, tuple[str, str]], code: str
) -> None:
    base_url = f"{revocable_gateway.gateway.http_address}/envs/{NAME}"
    headers = {"authorization": f"Bearer {ALICE_TOKEN}"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        rpc_request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
        initialize_response = await http.post(f"{base_url}/mcp", json=rpc_request)
        session_header = {"mcp-session-id": initialize_response.headers["mcp-session-id"]}
        await http.post(f"{base_url}/reset", json={})
        revocable_gateway.replace_tenants(entries)
        responses = [
            await http.post(
                f"{base_url}/mcp",
                json=rpc_request | {"method": "tools/list"},
                headers=session_header,
            ),
            await http.delete(f"{base_url}/mcp", headers=session_header),
            await http.post(f"{base_url}/step", json={"action": {"add": 1}}),
            await http.get(f"{base_url}/state"),
        ]
        assert {response.json()["detail"]["code"] for response in responses} == {code}


@pytest.mark.slow
async def test_revoking_one_token_keeps_connections_of_the_second_token_open(
    revocable_gateway: RevocableGateway, tmp_path: Path, clock: Clock
) -> None:
    digests = [
        hashlib.sha256(token.encode()).hexdigest() for token in (ALICE_TOKEN, ALICE_SECOND_TOKEN)
    ]
    tenants_text = f'[[tenants]]\nname = "alice"\ntoken_sha256 = {json.dumps(digests)}\n'
    (tmp_path / "tenants.toml").write_text(tenants_text)
    clock.now_s += 1.0
    async with (
        revocable_gateway.make_stream(ALICE_TOKEN) as first_stream,
        revocable_gateway.make_stream(ALICE_SECOND_TOKEN) as second_stream,
    ):
        await first_stream.open()
        session_id = await second_stream.open()
        (tmp_path / "tenants.toml").write_text(tenants_text.replace(f'"{digests[0]}", ', ""))
        clock.now_s += 1.0
        assert await first_stream.call.code() is grpc.StatusCode.UNAUTHENTICATED
        reply = await second_stream.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
        assert not reply.HasField("error")


@pytest.mark.slow
async def test_sessions_of_a_revoked_connection_linger(
    revocable_gateway: RevocableGateway,
) -> None:
    async with revocable_gateway.make_stream(ALICE_TOKEN) as stream:
        await stream.open()
        revocable_gateway.replace_tenants({})
        assert await stream.call.code() is grpc.StatusCode.UNAUTHENTICATED
        sessions = revocable_gateway.gateway.environments[NAME]
        await wait_until(lambda: all(session.detached_s for session in sessions.tracked_sessions))

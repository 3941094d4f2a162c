"""Revoked rights apply to open connections on every wire."""

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
from tests.gateway.gateways import NAME, run_gateway

ALICE = "a11ce-a11ce-a11ce-a11ce"
OTHER = "a11ce-two-a11ce-two-a11ce"
BOB = "b0b-b0b-b0b-b0b-b0b-b0b"


def tenants(path: Path, **entries: tuple[str, str]) -> None:
    """Write one tenant per keyword, with its token and scope."""
    path.write_text(
        "".join(
            f'[[tenants]]\nname = "{name}"\nscopes = ["{scope}"]\n'
            f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
            for name, (token, scope) in entries.items()
        )
    )


DEEDS = {
    "the tenant is removed": ({}, "UNAUTHENTICATED"),
    "the token is replaced": ({"alice": (OTHER, "step")}, "UNAUTHENTICATED"),
    "the token is another's now": ({"carol": (ALICE, "step")}, "UNAUTHENTICATED"),
    "the scope is narrowed": ({"alice": (ALICE, "admin")}, "PERMISSION_DENIED"),
}
"""Changes of the tenant alice, and the resulting error codes."""
REMOVALS = [name for name in DEEDS if "another" not in name]
"""Changes after which no tenant has the token, or its tenant cannot play."""
EACH_DEED = pytest.mark.parametrize(("entries", "code"), DEEDS.values(), ids=DEEDS)


class Revocable:
    """A gateway for alice and bob whose tenants file can change."""

    def __init__(self, gateway: Gateway, path: Path, clock: Clock) -> None:
        self.gateway = gateway
        self._path = path
        self._clock = clock

    def write(self, entries: dict[str, tuple[str, str]]) -> None:
        tenants(self._path, bob=(BOB, "step"), **entries)
        self._clock.now_s += 1.0

    def stream(self, token: str) -> RawStream:
        return RawStream(self.gateway.grpc_address, token)

    async def socket(self, path: str, token: str) -> ClientConnection:
        url = f"{self.gateway.http_address}/envs/{NAME}{path}".replace("http", "ws", 1)
        return await connect(url, additional_headers={"authorization": f"Bearer {token}"})


@pytest.fixture
async def revocable(tmp_path: Path, clock: Clock) -> AsyncIterator[Revocable]:
    path = tmp_path / "tenants.toml"
    tenants(path, alice=(ALICE, "step"), bob=(BOB, "step"))
    async with run_gateway(tenants_file=str(path), clock=clock) as (gateway, _):
        yield Revocable(gateway, path, clock)


def every_call(session_id: str) -> list[pb.Call]:
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


@EACH_DEED
async def test_every_kind_of_call_on_an_open_stream_is_refused(
    revocable: Revocable,
    entries: dict[str, tuple[str, str]],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with revocable.stream(ALICE) as stream, revocable.stream(ALICE) as late:
        # Calls are refused even before the stream is closed.
        access = revocable.gateway.access
        monkeypatch.setattr(access, "close_refused_connections", lambda: None)
        session_id = await stream.open(reset=pb.ResetArgs(seed=1))
        await late.open()
        revocable.write(entries)
        for call in every_call(session_id):
            reply = await late.ask(call)
            assert reply.error.code == code, call.WhichOneof("call")
        assert revocable.gateway.num_sessions == 2


@EACH_DEED
async def test_revoked_connections_are_closed_and_others_stay_open(
    revocable: Revocable,
    entries: dict[str, tuple[str, str]],
    code: str,
) -> None:
    async with revocable.stream(ALICE) as stream, revocable.stream(BOB) as other:
        await stream.open()
        await other.open()
        sockets = [await revocable.socket(path, ALICE) for path in ("/ws", "/mcp")]
        other_sockets = [await revocable.socket(path, BOB) for path in ("/ws", "/mcp")]
        revocable.write(entries)
        async with asyncio.timeout(60):
            assert (await stream.call.code()).name == code
            for socket in sockets:
                await socket.wait_closed()
        assert [socket.close_code for socket in sockets] == [1008, 1008]
        words = ("removed", "revoked", "scope")
        reasons = [socket.close_reason or "" for socket in sockets]
        assert all(any(word in reason for word in words) for reason in reasons)
        await other.open()
        await other_sockets[0].send('{"type": "reset", "data": {}}')
        assert '"observation"' in str(await other_sockets[0].recv())
        await other_sockets[1].send('{"jsonrpc": "2.0", "id": 1, "method": "ping"}')
        assert json.loads(await other_sockets[1].recv())["result"] == {}
        for socket in other_sockets:
            await socket.close()


def test_open_connections_are_checked_as_often_as_documented() -> None:
    text = Path("docs/security.md").read_text()
    assert "**within two seconds**" in text
    assert gateway_module.REVOCATION_INTERVAL_S <= 1.0


@pytest.mark.parametrize(("entries", "code"), [DEEDS[name] for name in REMOVALS], ids=REMOVALS)
async def test_requests_of_plain_http_and_mcp_are_refused(
    revocable: Revocable, entries: dict[str, tuple[str, str]], code: str
) -> None:
    base = f"{revocable.gateway.http_address}/envs/{NAME}"
    headers = {"authorization": f"Bearer {ALICE}"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        ask = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
        began = await http.post(f"{base}/mcp", json=ask)
        ticket = {"mcp-session-id": began.headers["mcp-session-id"]}
        await http.post(f"{base}/reset", json={})
        revocable.write(entries)
        answers = [
            await http.post(f"{base}/mcp", json=ask | {"method": "tools/list"}, headers=ticket),
            await http.delete(f"{base}/mcp", headers=ticket),
            await http.post(f"{base}/step", json={"action": {"add": 1}}),
            await http.get(f"{base}/state"),
        ]
        assert {answer.json()["detail"]["code"] for answer in answers} == {code}


async def test_connections_of_the_second_token_stay_open(
    revocable: Revocable, tmp_path: Path, clock: Clock
) -> None:
    digests = [hashlib.sha256(token.encode()).hexdigest() for token in (ALICE, OTHER)]
    both = f'[[tenants]]\nname = "alice"\ntoken_sha256 = {json.dumps(digests)}\n'
    (tmp_path / "tenants.toml").write_text(both)
    clock.now_s += 1.0
    async with revocable.stream(ALICE) as first, revocable.stream(OTHER) as second:
        await first.open()
        session_id = await second.open()
        (tmp_path / "tenants.toml").write_text(both.replace(f'"{digests[0]}", ', ""))
        clock.now_s += 1.0
        assert await first.call.code() is grpc.StatusCode.UNAUTHENTICATED
        state = await second.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
        assert not state.HasField("error")


async def test_sessions_of_a_revoked_connection_linger_and_end(
    revocable: Revocable,
) -> None:
    async with revocable.stream(ALICE) as stream:
        await stream.open()
        revocable.write({})
        assert await stream.call.code() is grpc.StatusCode.UNAUTHENTICATED
        sessions = revocable.gateway.environments[NAME]
        await wait_until(lambda: all(tracked.detached_s for tracked in sessions.tracked_sessions))

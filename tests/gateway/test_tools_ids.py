"""Tools ids, which permit tool calls of a session and no other calls."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from websockets.asyncio.client import connect

from ludus.env.recording.format import read_recording
from ludus.env.security.session_ids import SessionIdIssuer, SessionKey
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import AuthenticationError, PermissionDeniedError, SessionLostError
from tests.env.raw_stream import RawStream
from tests.env.served import serve
from tests.env.tool_env import ToolEnv
from tests.gateway.gateways import NAME, connect_client, count_sessions, make_gateway, run_gateway


class ThreadedToolEnv(ToolEnv):
    """ToolEnv with steps in threads."""

    steps_on_event_loop = False


class Endpoint:
    """The addresses of an environment on a server or a gateway."""

    def __init__(self, grpc_address: str, http_address: str, servers: list[Any]) -> None:
        self.grpc_address = grpc_address
        self.http_address = http_address
        self.servers = servers

    async def open_session(self, stream: RawStream) -> pb.OpenResponse:
        return (await stream.ask(pb.Call(open=pb.OpenRequest(reset=pb.ResetArgs(seed=1))))).open

    async def call_mcp(self, method: str, **params: Any) -> Any:
        async with httpx.AsyncClient(timeout=60) as http:
            rpc_request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return (await http.post(f"{self.http_address}/mcp", json=rpc_request)).json()


@pytest.fixture(params=["server", "threaded server", "gateway", "gateway to threads"])
async def endpoint(request: pytest.FixtureRequest) -> AsyncIterator[Endpoint]:
    factory = ThreadedToolEnv if "thread" in request.param else ToolEnv
    if "gateway" in request.param:
        async with run_gateway(1, factory=factory) as (gateway, servers):
            base_url = f"{gateway.http_address}/envs/{NAME}"
            yield Endpoint(gateway.grpc_address, base_url, servers)
        return
    async with serve(factory) as server:
        yield Endpoint(server.grpc_address, server.http_address, [server])


def make_tool_call(session_id: str, name: str = "note") -> pb.Call:
    arguments = b'{"text": "a"}'
    return pb.Call(
        call_tool=pb.CallToolRequest(session_id=session_id, name=name, arguments_json=arguments)
    )


@pytest.mark.slow
async def test_every_protocol_returns_a_unique_tools_id(endpoint: Endpoint) -> None:
    async with RawStream(endpoint.grpc_address) as stream:
        first_response = await endpoint.open_session(stream)
        group = (await stream.ask(pb.Call(open_group=pb.OpenGroupRequest(size=2)))).open_group
        tools_ids = {
            response.session_id: response.tools_session_id
            for response in (first_response, *group.sessions)
        }
    async with httpx.AsyncClient(timeout=60) as http:
        headers = (await http.post(f"{endpoint.http_address}/reset", json={})).headers
        tools_ids[headers["x-session-id"]] = headers["x-tools-session-id"]
    created_session = (await endpoint.call_mcp("openenv/session/create"))["result"]
    tools_ids[created_session["session_id"]] = created_session["tools_session_id"]
    assert len(set(tools_ids) | set(tools_ids.values())) == 10
    assert not any(session_id in tools_id for session_id, tools_id in tools_ids.items())
    for address in (endpoint.grpc_address, endpoint.http_address):
        async with connect_client(address) as client:
            session, _ = await client.open(seed=1)
            assert session.tools_id and session.tools_id not in tools_ids.values()


@pytest.mark.slow
async def test_tools_id_calls_tools_without_revealing_the_session_id(endpoint: Endpoint) -> None:
    async with (
        RawStream(endpoint.grpc_address) as stream,
        RawStream(endpoint.grpc_address) as agent_stream,
    ):
        session = await endpoint.open_session(stream)
        tools_id = session.tools_session_id
        reply = await agent_stream.ask(make_tool_call(tools_id))
        assert orjson.loads(reply.call_tool.result_json) == {"notes": ["a"]}
        assert reply.call_tool.session_id == tools_id
        tool_response = await endpoint.call_mcp(
            "tools/call", name="note", arguments={"text": "b"}, session_id=tools_id
        )
        assert tool_response["result"]["structuredContent"] == {"notes": ["a", "b"]}
        failed_reply = await agent_stream.ask(make_tool_call(tools_id, "fail"))
        assert failed_reply.error.code == "TOOL_ERROR"
        for server in endpoint.servers:
            await server.core.close(session.session_id)
        lost_reply = await agent_stream.ask(make_tool_call(tools_id))
        assert lost_reply.error.code == "SESSION_LOST"
        assert session.session_id not in f"{reply}{tool_response}{failed_reply}{lost_reply}"


@pytest.mark.slow
async def test_tools_id_permits_only_tool_calls(endpoint: Endpoint) -> None:
    async with (
        RawStream(endpoint.grpc_address) as stream,
        RawStream(endpoint.grpc_address) as agent_stream,
    ):
        session = await endpoint.open_session(stream)
        tools_id = session.tools_session_id
        step = pb.StepRequest(session_id=tools_id, action_json=b'{"add": 1}', step_index=1)
        for call in (
            pb.Call(step=step),
            pb.Call(reset=pb.ResetRequest(session_id=tools_id)),
            pb.Call(state=pb.StateRequest(session_id=tools_id)),
            pb.Call(close=pb.CloseRequest(session_id=tools_id)),
            pb.Call(detach=pb.DetachRequest(session_id=tools_id)),
        ):
            assert (await agent_stream.ask(call)).error.code == "PERMISSION_DENIED", call
        open_reply = await agent_stream.ask(pb.Call(open=pb.OpenRequest(session_id=tools_id)))
        assert open_reply.HasField("error")
        await assert_http_requests_are_refused(endpoint, tools_id)
        agent_stream.call.cancel()
        session_step = pb.StepRequest(
            session_id=session.session_id, action_json=b'{"add": 1}', step_index=1
        )
        assert (await stream.ask(pb.Call(step=session_step))).result.step_index == 1
        assert count_sessions(endpoint.servers) == 1


async def assert_http_requests_are_refused(endpoint: Endpoint, tools_id: str) -> None:
    headers = {"x-session-id": tools_id}
    async with httpx.AsyncClient(
        base_url=endpoint.http_address, headers=headers, timeout=60
    ) as http:
        for method, path in (
            ("POST", "/reset"),
            ("POST", "/step"),
            ("GET", "/state"),
            ("POST", "/close"),
        ):
            body = {"action": {"add": 1}} if path == "/step" else {}
            response = await http.request(method, path, json=None if method == "GET" else body)
            outcome = (response.status_code, response.json()["detail"]["code"])
            assert outcome == (403, "PERMISSION_DENIED"), path
    close_response = await endpoint.call_mcp("openenv/session/close", session_id=tools_id)
    assert close_response["error"]["data"]["code"] == "PERMISSION_DENIED"
    address = endpoint.http_address.replace("http", "ws", 1)
    async with connect(f"{address}/ws?session_id={tools_id}&ludus=1") as socket:
        response = orjson.loads(await socket.recv())
        assert response["data"]["code"] == "PERMISSION_DENIED"


@pytest.mark.slow
async def test_every_gateway_accepts_a_tools_id() -> None:
    async with (
        run_gateway(1, factory=ToolEnv) as (first_gateway, servers),
        make_gateway(*servers) as second_gateway,
        RawStream(first_gateway.grpc_address) as stream,
        RawStream(second_gateway.grpc_address) as agent_stream,
    ):
        session = (await stream.ask(pb.Call(open=pb.OpenRequest()))).open
        reply = await agent_stream.ask(make_tool_call(session.tools_session_id))
        assert orjson.loads(reply.call_tool.result_json) == {"notes": ["a"]}


def test_tools_id_cannot_become_a_session_id_or_open_sessions() -> None:
    key = SessionKey(b"k" * 32)
    session_id = key.sign("cards", "server", tenant="alice")
    tools_id = key.make_tools_id(session_id)
    parsed_id = key.read(tools_id)
    assert (parsed_id.is_tools_only, parsed_id.session_id) == (True, session_id)
    assert not key.read(session_id).is_tools_only
    body, _, mac = tools_id.rpartition("~")
    for forged_id in (
        f"{body.removesuffix('~tools')}~{mac}",
        f"{body}~tools~{mac}",
        f"{session_id.rpartition('~')[0]}~tools~{session_id.rpartition('~')[2]}",
    ):
        with pytest.raises(AuthenticationError):
            key.read(forged_id)
    with pytest.raises(PermissionDeniedError):
        SessionIdIssuer("server", key).choose(tools_id)


def test_clocks_that_differ_too_much_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    key, now_s = SessionKey(b"k" * 32), time.time()
    issuer = SessionIdIssuer("server", key)
    monkeypatch.setattr(time, "time", lambda: now_s - 120)
    tolerated_id = key.sign("cards", "server")
    monkeypatch.setattr(time, "time", lambda: now_s - 3600)
    late_id = key.sign("cards", "server")
    monkeypatch.setattr(time, "time", lambda: now_s)
    assert issuer.choose(tolerated_id) == tolerated_id
    with pytest.raises(SessionLostError, match=r"issued 360\d s ago .* clocks of gateway and"):
        issuer.choose(late_id)


async def test_tool_calls_with_a_tools_id_are_recorded_in_the_episode(tmp_path: Path) -> None:
    async with (
        serve(ToolEnv, record=tmp_path) as server,
        RawStream(server.grpc_address) as stream,
    ):
        session = (await stream.ask(pb.Call(open=pb.OpenRequest(reset=pb.ResetArgs())))).open
        await stream.ask(make_tool_call(session.tools_session_id))
        await stream.ask(pb.Call(close=pb.CloseRequest(session_id=session.session_id)))
    (episode,) = read_recording(tmp_path)
    assert [step.tool for step in episode.steps] == ["note"]


async def test_environment_without_tools_has_no_tools_id() -> None:
    async with serve() as server, RawStream(server.grpc_address) as stream:
        session = (await stream.ask(pb.Call(open=pb.OpenRequest()))).open
        assert session.session_id and not session.tools_session_id

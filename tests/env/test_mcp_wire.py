"""MCP endpoints, as used by the standard client and by OpenEnv clients."""

import asyncio
import json

import httpx
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from ludus.env.http.app import build_app
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import make_local_host
from ludus.env.sessions.options import ServerOptions
from tests.env.counting_env import CountingEnv
from tests.env.served import serve
from tests.env.tool_env import ToolEnv


def make_core(factory=ToolEnv, **options) -> SessionCore:
    return SessionCore(make_local_host(factory), ServerOptions(**options))


def make_client(core: SessionCore) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(core))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def make_rpc(method: str, params=None, request_id: int = 1):
    message = {"jsonrpc": "2.0", "id": request_id, "method": method}
    return message if params is None else {**message, "params": params}


async def post_rpc(client, method: str, params=None, **headers):
    response = await client.post("/mcp", json=make_rpc(method, params), headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def initialize(client) -> dict[str, str]:
    """Open a session with a handshake, and return the header with the session id."""
    message = make_rpc("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}})
    response = await client.post("/mcp", json=message)
    return {"mcp-session-id": response.headers["mcp-session-id"]}


def get_tool_names(response) -> list[str]:
    return [tool["name"] for tool in response["result"]["tools"]]


PLAY_TOOLS = ["start_episode", "take_action", "get_state"]


@pytest.mark.slow
@pytest.mark.parametrize("factory", [CountingEnv, ToolEnv])
async def test_the_standard_client_plays_an_episode(factory) -> None:
    async with (
        serve(factory) as server,
        streamable_http_client(server.http_address + "/mcp") as streams,
        ClientSession(streams[0], streams[1]) as session,
    ):
        initialize_result = await session.initialize()
        assert initialize_result.server_info.name == factory.name
        environment_tools = ["note", "fail", "wrong"] if factory is ToolEnv else []
        tools = (await session.list_tools()).tools
        assert [tool.name for tool in tools] == environment_tools + PLAY_TOOLS
        assert "add" in tools[-2].input_schema["properties"]
        first_result = await session.call_tool("start_episode", {"seed": 5})
        assert first_result.content[0].text == "Count to the end. Total 0."
        assert first_result.structured_content["observation"]["luck"] == 653159
        for amount in (1, 2, 7):
            result = await session.call_tool("take_action", {"add": amount})
        assert result.structured_content["truncated"] is True
        assert result.structured_content["observation"]["total"] == 10
        error_result = await session.call_tool("take_action", {"add": 1})
        assert error_result.is_error and "EPISODE_OVER" in error_result.content[0].text
        state = await session.call_tool("get_state", {})
        assert json.loads(state.content[0].text)["total"] == 10
        if factory is ToolEnv:
            note_result = await session.call_tool("note", {"text": "hi"})
            assert note_result.structured_content == {"notes": ["hi"]}
    assert server.core.load.num_sessions == 0, "the session outlived the client"


@pytest.mark.slow
async def test_two_standard_clients_have_separate_sessions() -> None:
    async with serve() as server:

        async def read_total(*amounts: int) -> int:
            async with (
                streamable_http_client(server.http_address + "/mcp") as streams,
                ClientSession(streams[0], streams[1]) as session,
            ):
                await session.initialize()
                await session.call_tool("start_episode", {})
                for amount in amounts:
                    result = await session.call_tool("take_action", {"add": amount})
                return result.structured_content["observation"]["total"]

        assert await asyncio.gather(read_total(1, 1), read_total(2, 2, 3)) == [2, 7]


async def test_handshake_follows_streamable_http() -> None:
    core = make_core()
    async with make_client(core) as client:
        for offered_version, version in (
            ("2025-03-26", "2025-03-26"),
            ("1999-01-01", "2025-11-25"),
        ):
            response = await client.post(
                "/mcp", json=make_rpc("initialize", {"protocolVersion": offered_version})
            )
            assert response.json()["result"]["protocolVersion"] == version
            assert response.json()["result"]["capabilities"] == {"tools": {"listChanged": False}}
        session_headers = {"mcp-session-id": response.headers["mcp-session-id"]}
        notification = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        response = await client.post("/mcp", json=notification, headers=session_headers)
        assert (response.status_code, response.content) == (202, b"")
        assert (await post_rpc(client, "ping", **session_headers))["result"] == {}
        assert (await client.get("/mcp")).status_code == 405
        assert (await client.delete("/mcp")).status_code == 400
        assert (await client.delete("/mcp", headers=session_headers)).status_code == 204
        assert core.load.num_sessions == 1
        call = make_rpc("tools/call", {"name": "note", "arguments": {}})
        assert (await client.post("/mcp", json=call, headers=session_headers)).status_code == 404


async def test_forged_session_id_returns_404() -> None:
    async with make_client(make_core()) as client:
        session_id = (await post_rpc(client, "openenv/session/create"))["result"]["session_id"]
        for forged_id in (session_id, session_id + ".", session_id + ".AAAA", "x", "."):
            headers = {"mcp-session-id": forged_id}
            response = await client.post("/mcp", json=make_rpc("tools/list"), headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (404, -32600)
            assert (await client.delete("/mcp", headers=headers)).status_code == 404


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"\xff\x00", -32700),
        (b"{}", -32600),
        (b"[]", -32600),
        (b"17", -32600),
        (b'{"jsonrpc":"2.0","id":1}', -32600),
        (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"nope"}', -32601),
        (b'{"jsonrpc":"2.0","id":1,"method":"server/discover","params":{}}', -32601),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":[]}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"openenv/session/close"}', -32602),
    ],
)
async def test_bad_requests_return_json_rpc_error_codes_with_status_200(body, code: int) -> None:
    async with make_client(make_core()) as client:
        response = await client.post("/mcp", content=body)
        assert response.status_code == 200
        content = response.json()
        assert (content["jsonrpc"], content["error"]["code"]) == ("2.0", code)
        assert "data" in content["error"]


async def test_openenv_sessions_expose_only_environment_tools() -> None:
    core = make_core()
    async with make_client(core) as client:
        session_id = (await post_rpc(client, "openenv/session/create"))["result"]["session_id"]
        assert get_tool_names(await post_rpc(client, "tools/list")) == ["note", "fail", "wrong"]
        arguments = {"name": "note", "arguments": {"text": "a"}, "session_id": session_id}
        await post_rpc(client, "tools/call", arguments)
        result = (await post_rpc(client, "tools/call", arguments))["result"]
        assert result["structuredContent"] == result["data"] == {"notes": ["a", "a"]}
        assert (result["isError"], result["is_error"]) == (False, False)
        for name in PLAY_TOOLS:
            error = (await post_rpc(client, "tools/call", {**arguments, "name": name}))["error"]
            assert (error["code"], error["message"]) == (-32603, f"Unknown tool: {name!r}")
        fail_arguments = {**arguments, "name": "fail"}
        fail_result = (await post_rpc(client, "tools/call", fail_arguments))["result"]
        assert fail_result["isError"] and "the tool is broken" in fail_result["content"][0]["text"]
        close_result = (await post_rpc(client, "openenv/session/close", arguments))["result"]
        assert close_result == {"session_id": session_id, "closed": True}
        error = (await post_rpc(client, "tools/call", arguments))["error"]
        assert error["code"] == -32602 and error["message"].startswith("Unknown session_id")
        error = (await post_rpc(client, "openenv/session/close", arguments))["error"]
        assert error["message"] == f"Unknown session_id: {session_id}"
        assert core.load.num_sessions == 0


async def test_each_call_without_a_session_uses_a_separate_environment() -> None:
    core = make_core()
    async with make_client(core) as client:
        for _ in range(2):
            result = (await post_rpc(client, "tools/call", {"name": "note"}))["result"]
            assert result["data"] == {"notes": [""]}
        assert core.load.num_sessions == 0


async def test_full_server_error_contains_session_counts() -> None:
    async with make_client(make_core(max_sessions=1)) as client:
        await post_rpc(client, "openenv/session/create")
        for method in ("openenv/session/create", "initialize"):
            error = (await post_rpc(client, method))["error"]
            assert error["code"] == -32000
            assert (error["data"]["active_sessions"], error["data"]["max_sessions"]) == (1, 1)


async def test_openenv_client_gets_an_error_if_the_environment_has_no_tools() -> None:
    async with make_client(make_core(CountingEnv)) as client:
        for method in ("tools/list", "tools/call"):
            error = (await post_rpc(client, method, {"name": "x"}))["error"]
            assert error["code"] == -32603
            assert error["message"] == "Environment does not support MCP"
        session_headers = await initialize(client)
        tool_list = await post_rpc(client, "tools/list", **session_headers)
        assert get_tool_names(tool_list) == PLAY_TOOLS


async def test_player_errors_are_returned_as_tool_results() -> None:
    async with make_client(make_core(CountingEnv)) as client:
        session_headers = await initialize(client)
        for name, arguments, code in (
            ("take_action", {"add": 1}, "NOT_RESET"),
            ("start_episode", {"seed": -1}, "VALIDATION_ERROR"),
            ("start_episode", {"seed": 1, "x": 1}, "VALIDATION_ERROR"),
            ("start_episode", {"seed": 1}, None),
            ("take_action", {"add": "x"}, "VALIDATION_ERROR"),
            ("take_action", {"add": 0}, "ILLEGAL_ACTION"),
            ("take_action", {"add": 13}, "EXECUTION_ERROR"),
            ("take_action", {"add": 1}, None),
        ):
            params = {"name": name, "arguments": arguments}
            result = (await post_rpc(client, "tools/call", params, **session_headers))["result"]
            assert result["isError"] == (code is not None)
            if code:
                assert code in result["content"][0]["text"]


def open_socket(server, path: str):
    return connect(server.http_address.replace("http", "ws") + path)


async def send(socket, message):
    await socket.send(json.dumps(message) if not isinstance(message, str) else message)
    return json.loads(await socket.recv())


async def test_mcp_socket_keeps_one_session_from_the_first_call_to_the_disconnect() -> None:
    async with serve(ToolEnv) as server:
        async with open_socket(server, "/mcp") as socket:
            assert get_tool_names(await send(socket, make_rpc("tools/list"))) == [
                "note",
                "fail",
                "wrong",
            ]
            assert server.core.load.num_sessions == 0
            for num_notes in (1, 2):
                result = await send(socket, make_rpc("tools/call", {"name": "note"}))
                assert len(result["result"]["data"]["notes"]) == num_notes
            session_id = (await send(socket, make_rpc("openenv/session/create")))["result"]
            response = await send(socket, make_rpc("openenv/session/close", session_id))
            assert response["error"]["code"] == -32600
            await send(socket, make_rpc("initialize"))
            assert (await send(socket, "{"))["error"]["code"] == -32700
            assert server.core.load.num_sessions == 1
        await asyncio.wait_for(wait_until_no_session_is_open(server), 60)


async def test_mcp_socket_can_play_after_initialize() -> None:
    async with serve() as server, open_socket(server, "/mcp") as socket:
        await send(socket, make_rpc("initialize"))
        await socket.send('{"jsonrpc":"2.0","method":"notifications/initialized"}')
        await send(socket, make_rpc("tools/call", {"name": "start_episode"}))
        params = {"name": "take_action", "arguments": {"add": 2}}
        result = (await send(socket, make_rpc("tools/call", params)))["result"]
        assert result["data"]["observation"]["total"] == 2
        await server.core.shut_down()
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert (socket.close_code, socket.close_reason) == (1001, "the server is shutting down")


async def test_mcp_frames_on_the_environment_socket_share_one_session() -> None:
    async with serve(ToolEnv) as server, open_socket(server, "/ws") as socket:
        frame = {"type": "mcp", "data": make_rpc("tools/call", {"name": "note"}, 9)}
        for num_notes in (1, 2):
            response = await send(socket, frame)
            assert (response["type"], response["data"]["id"]) == ("mcp", 9)
            assert len(response["data"]["result"]["data"]["notes"]) == num_notes
        await send(socket, {"type": "mcp", "data": make_rpc("initialize")})
        response = await send(socket, {"type": "mcp", "data": make_rpc("tools/list")})
        assert get_tool_names(response["data"]) == ["note", "fail", "wrong"]
        notification = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await send(socket, {"type": "mcp", "data": notification}))["type"] == "mcp"
        assert server.core.load.num_sessions == 1


async def test_openenv_tool_actions_go_through_step() -> None:
    def make_call(name, arguments=None):
        return {"type": "call_tool", "tool_name": name, "arguments": arguments or {}}

    async with serve(ToolEnv) as server, open_socket(server, "/ws") as socket:

        async def step(action):
            return (await send(socket, {"type": "step", "data": action}))["data"]

        tool_list = await step({"type": "list_tools"})
        assert [tool["name"] for tool in tool_list["observation"]["tools"]] == [
            "note",
            "fail",
            "wrong",
        ]
        assert tool_list["observation"]["tools"][0]["input_schema"]["type"] == "object"
        assert (tool_list["reward"], tool_list["done"]) == (None, False)
        note_result = (await step(make_call("note", {"text": "a"})))["observation"]
        assert (note_result["tool_name"], note_result["error"]) == ("note", None)
        assert note_result["result"]["data"] == {"notes": ["a"]}
        for name, error_type in (
            ("nope", "tool_not_found"),
            ("fail", "execution_error"),
            ("wrong", "invalid_args"),
        ):
            observation = (await step(make_call(name)))["observation"]
            assert (observation["result"], observation["error"]["error_type"]) == (None, error_type)
        await send(socket, {"type": "reset"})
        assert (await step({"add": 1}))["observation"]["total"] == 1
    async with make_client(make_core()) as client:
        body = {"action": make_call("note", {"text": "b"})}
        response = (await client.post("/step", json=body)).json()
        assert response["observation"]["result"]["data"] == {"notes": ["b"]}
        await client.post("/reset")
        for num_notes in (1, 2):
            response = (await client.post("/step", json=body)).json()
            assert len(response["observation"]["result"]["data"]["notes"]) == num_notes


async def wait_until_no_session_is_open(server) -> None:
    while server.core.load.num_sessions:
        await asyncio.sleep(0.01)

"""MCP: with the standard client, and as OpenEnv's own clients call it."""

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


def get_core(factory=ToolEnv, **options) -> SessionCore:
    return SessionCore(make_local_host(factory), ServerOptions(**options))


def in_process(core: SessionCore) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(core))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def request(method: str, params=None, request_id: str = 1):
    call = {"jsonrpc": "2.0", "id": request_id, "method": method}
    return call if params is None else {**call, "params": params}


async def post(client, method: str, params=None, **headers):
    reply = await client.post("/mcp", json=request(method, params), headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def initialize(client) -> dict[str, str]:
    """Open a session as a client does; return its header."""
    call = request("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}})
    reply = await client.post("/mcp", json=call)
    return {"mcp-session-id": reply.headers["mcp-session-id"]}


def names(listed) -> list[str]:
    return [tool["name"] for tool in listed["result"]["tools"]]


PLAY_TOOLS = ["start_episode", "take_action", "get_state"]


@pytest.mark.parametrize("factory", [CountingEnv, ToolEnv])
async def test_the_standard_client_plays_an_episode(factory) -> None:
    async with (
        serve(factory) as server,
        streamable_http_client(server.http_address + "/mcp") as streams,
        ClientSession(streams[0], streams[1]) as session,
    ):
        hello = await session.initialize()
        assert hello.server_info.name == factory.name
        environment_tools = ["note", "fail", "wrong"] if factory is ToolEnv else []
        listed = (await session.list_tools()).tools
        assert [tool.name for tool in listed] == environment_tools + PLAY_TOOLS
        assert "add" in listed[-2].input_schema["properties"]
        first = await session.call_tool("start_episode", {"seed": 5})
        assert first.content[0].text == "Count to the end. Total 0."
        assert first.structured_content["observation"]["luck"] == 653159
        for add in (1, 2, 7):
            result = await session.call_tool("take_action", {"add": add})
        assert result.structured_content["truncated"] is True
        assert result.structured_content["observation"]["total"] == 10
        over = await session.call_tool("take_action", {"add": 1})
        assert over.is_error and "EPISODE_OVER" in over.content[0].text
        state = await session.call_tool("get_state", {})
        assert json.loads(state.content[0].text)["total"] == 10
        if factory is ToolEnv:
            noted = await session.call_tool("note", {"text": "hi"})
            assert noted.structured_content == {"notes": ["hi"]}
    assert server.core.load.num_sessions == 0, "leaving ends the session"


async def test_two_standard_clients_have_separate_sessions() -> None:
    async with serve() as server:

        async def read_total(*adds: int) -> int:
            async with (
                streamable_http_client(server.http_address + "/mcp") as streams,
                ClientSession(streams[0], streams[1]) as session,
            ):
                await session.initialize()
                await session.call_tool("start_episode", {})
                for add in adds:
                    result = await session.call_tool("take_action", {"add": add})
                return result.structured_content["observation"]["total"]

        assert await asyncio.gather(read_total(1, 1), read_total(2, 2, 3)) == [2, 7]


async def test_the_handshake_is_that_of_streamable_http() -> None:
    core = get_core()
    async with in_process(core) as client:
        for requested, negotiated in (("2025-03-26", "2025-03-26"), ("1999-01-01", "2025-11-25")):
            reply = await client.post(
                "/mcp", json=request("initialize", {"protocolVersion": requested})
            )
            assert reply.json()["result"]["protocolVersion"] == negotiated
            assert reply.json()["result"]["capabilities"] == {"tools": {"listChanged": False}}
        ticket = {"mcp-session-id": reply.headers["mcp-session-id"]}
        log_message = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        reply = await client.post("/mcp", json=log_message, headers=ticket)
        assert (reply.status_code, reply.content) == (202, b"")
        assert (await post(client, "ping", **ticket))["result"] == {}
        assert (await client.get("/mcp")).status_code == 405
        assert (await client.delete("/mcp")).status_code == 400
        assert (await client.delete("/mcp", headers=ticket)).status_code == 204
        assert core.load.num_sessions == 1
        call = request("tools/call", {"name": "note", "arguments": {}})
        assert (await client.post("/mcp", json=call, headers=ticket)).status_code == 404


async def test_a_forged_ticket_is_no_session() -> None:
    async with in_process(get_core()) as client:
        session_id = (await post(client, "openenv/session/create"))["result"]["session_id"]
        for forged in (session_id, session_id + ".", session_id + ".AAAA", "x", "."):
            headers = {"mcp-session-id": forged}
            reply = await client.post("/mcp", json=request("tools/list"), headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, -32600)
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
async def test_bad_requests_get_the_codes_of_json_rpc_and_status_200(body, code: str) -> None:
    async with in_process(get_core()) as client:
        reply = await client.post("/mcp", content=body)
        assert reply.status_code == 200
        answer = reply.json()
        assert (answer["jsonrpc"], answer["error"]["code"]) == ("2.0", code)
        assert "data" in answer["error"]


async def test_sessions_of_openenvs_own_calls_see_only_the_environments_tools() -> None:
    core = get_core()
    async with in_process(core) as client:
        session_id = (await post(client, "openenv/session/create"))["result"]["session_id"]
        assert names(await post(client, "tools/list")) == ["note", "fail", "wrong"]
        call = {"name": "note", "arguments": {"text": "a"}, "session_id": session_id}
        await post(client, "tools/call", call)
        result = (await post(client, "tools/call", call))["result"]
        assert result["structuredContent"] == result["data"] == {"notes": ["a", "a"]}
        assert (result["isError"], result["is_error"]) == (False, False)
        for name in PLAY_TOOLS:
            error = (await post(client, "tools/call", {**call, "name": name}))["error"]
            assert (error["code"], error["message"]) == (-32603, f"Unknown tool: {name!r}")
        failed = (await post(client, "tools/call", {**call, "name": "fail"}))["result"]
        assert failed["isError"] and "the tool is broken" in failed["content"][0]["text"]
        closed = (await post(client, "openenv/session/close", call))["result"]
        assert closed == {"session_id": session_id, "closed": True}
        error = (await post(client, "tools/call", call))["error"]
        assert error["code"] == -32602 and error["message"].startswith("Unknown session_id")
        error = (await post(client, "openenv/session/close", call))["error"]
        assert error["message"] == f"Unknown session_id: {session_id}"
        assert core.load.num_sessions == 0


async def test_a_call_without_a_session_has_a_separate_environment() -> None:
    core = get_core()
    async with in_process(core) as client:
        for _ in range(2):
            result = (await post(client, "tools/call", {"name": "note"}))["result"]
            assert result["data"] == {"notes": [""]}
        assert core.load.num_sessions == 0


async def test_a_full_server_says_how_full() -> None:
    async with in_process(get_core(max_sessions=1)) as client:
        await post(client, "openenv/session/create")
        for method in ("openenv/session/create", "initialize"):
            error = (await post(client, method))["error"]
            assert error["code"] == -32000
            assert (error["data"]["active_sessions"], error["data"]["max_sessions"]) == (1, 1)


async def test_an_environment_without_tools_says_so_to_openenvs_clients() -> None:
    async with in_process(get_core(CountingEnv)) as client:
        for method in ("tools/list", "tools/call"):
            error = (await post(client, method, {"name": "x"}))["error"]
            assert error["code"] == -32603
            assert error["message"] == "Environment does not support MCP"
        assert names(await post(client, "tools/list", **await initialize(client))) == PLAY_TOOLS


async def test_what_a_player_does_wrong_is_a_result() -> None:
    async with in_process(get_core(CountingEnv)) as client:
        ticket = await initialize(client)
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
            result = (await post(client, "tools/call", params, **ticket))["result"]
            assert result["isError"] == (code is not None)
            if code:
                assert code in result["content"][0]["text"]


def socket_to(server, path: str):
    return connect(server.http_address.replace("http", "ws") + path)


async def ask(socket, message):
    await socket.send(json.dumps(message) if not isinstance(message, str) else message)
    return json.loads(await socket.recv())


async def test_a_socket_for_mcp_has_one_session_from_its_first_need_to_its_end() -> None:
    async with serve(ToolEnv) as server:
        async with socket_to(server, "/mcp") as socket:
            assert names(await ask(socket, request("tools/list"))) == ["note", "fail", "wrong"]
            assert server.core.load.num_sessions == 0
            for count in (1, 2):
                result = await ask(socket, request("tools/call", {"name": "note"}))
                assert len(result["result"]["data"]["notes"]) == count
            session_id = (await ask(socket, request("openenv/session/create")))["result"]
            refused = await ask(socket, request("openenv/session/close", session_id))
            assert refused["error"]["code"] == -32600
            await ask(socket, request("initialize"))
            assert (await ask(socket, "{"))["error"]["code"] == -32700
            assert server.core.load.num_sessions == 1
        await asyncio.wait_for(_until_empty(server), 60)


async def test_a_socket_that_begins_with_initialize_may_play() -> None:
    async with serve() as server, socket_to(server, "/mcp") as socket:
        await ask(socket, request("initialize"))
        await socket.send('{"jsonrpc":"2.0","method":"notifications/initialized"}')
        await ask(socket, request("tools/call", {"name": "start_episode"}))
        params = {"name": "take_action", "arguments": {"add": 2}}
        result = (await ask(socket, request("tools/call", params)))["result"]
        assert result["data"]["observation"]["total"] == 2
        await server.core.shut_down()
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert (socket.close_code, socket.close_reason) == (1001, "the server is shutting down")


async def test_frames_on_the_environments_socket_share_its_session() -> None:
    async with serve(ToolEnv) as server, socket_to(server, "/ws") as socket:
        call = {"type": "mcp", "data": request("tools/call", {"name": "note"}, 9)}
        for count in (1, 2):
            reply = await ask(socket, call)
            assert (reply["type"], reply["data"]["id"]) == ("mcp", 9)
            assert len(reply["data"]["result"]["data"]["notes"]) == count
        await ask(socket, {"type": "mcp", "data": request("initialize")})
        listed = await ask(socket, {"type": "mcp", "data": request("tools/list")})
        assert names(listed["data"]) == ["note", "fail", "wrong"]
        log_message = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await ask(socket, {"type": "mcp", "data": log_message}))["type"] == "mcp"
        assert server.core.load.num_sessions == 1


async def test_tool_actions_of_openenv_go_through_step() -> None:
    def call(name, arguments=None):
        return {"type": "call_tool", "tool_name": name, "arguments": arguments or {}}

    async with serve(ToolEnv) as server, socket_to(server, "/ws") as socket:

        async def step(action):
            return (await ask(socket, {"type": "step", "data": action}))["data"]

        listed = await step({"type": "list_tools"})
        assert [tool["name"] for tool in listed["observation"]["tools"]] == [
            "note",
            "fail",
            "wrong",
        ]
        assert listed["observation"]["tools"][0]["input_schema"]["type"] == "object"
        assert (listed["reward"], listed["done"]) == (None, False)
        done = (await step(call("note", {"text": "a"})))["observation"]
        assert (done["tool_name"], done["error"]) == ("note", None)
        assert done["result"]["data"] == {"notes": ["a"]}
        for name, kind in (
            ("nope", "tool_not_found"),
            ("fail", "execution_error"),
            ("wrong", "invalid_args"),
        ):
            failed = (await step(call(name)))["observation"]
            assert (failed["result"], failed["error"]["error_type"]) == (None, kind)
        await ask(socket, {"type": "reset"})
        assert (await step({"add": 1}))["observation"]["total"] == 1
    async with in_process(get_core()) as client:
        body = {"action": call("note", {"text": "b"})}
        reply = (await client.post("/step", json=body)).json()
        assert reply["observation"]["result"]["data"] == {"notes": ["b"]}
        await client.post("/reset")
        for count in (1, 2):
            reply = (await client.post("/step", json=body)).json()
            assert len(reply["observation"]["result"]["data"]["notes"]) == count


async def _until_empty(server) -> None:
    while server.core.load.num_sessions:
        await asyncio.sleep(0.01)

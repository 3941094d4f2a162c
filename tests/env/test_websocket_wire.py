"""Exact messages of OpenEnv's `/ws` and HTTP endpoints."""

import asyncio
import json
import urllib.error
import urllib.request

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.polling import wait_for_sessions
from tests.env.served import serve

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=[CountingEnv, ThreadedCountingEnv])
def factory(request: pytest.FixtureRequest):
    return request.param


def open_socket(server, query: str = ""):
    return connect(server.http_address.replace("http", "ws") + "/ws" + query)


async def send(socket, message) -> str:
    await socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
    return await socket.recv()


async def test_upstream_clients_get_upstream_frames(factory) -> None:
    async with serve(factory) as server, open_socket(server) as socket:
        assert await send(socket, {"type": "state"}) == (
            '{"type":"state","data":{"episode_id":null,"step_count":0}}'
        )
        reset_data = {"seed": 5, "episode_id": "E", "start": 5, "unknown": True}
        assert await send(socket, {"type": "reset", "data": reset_data}) == (
            '{"type":"observation","data":{"observation":{"metadata":{},"total":5,"luck":653159},'
            '"reward":null,"done":false}}'
        )
        assert await send(socket, {"type": "step", "data": {"add": 2}}) == (
            '{"type":"observation","data":{"observation":{"metadata":{},"total":7,"luck":267853},'
            '"reward":2.0,"done":false}}'
        )
        assert await send(socket, {"type": "state"}) == (
            '{"type":"state","data":{"episode_id":"E","step_count":1,"total":7}}'
        )
        assert '"done":true' in await send(socket, {"type": "step", "data": {"add": 7}})


async def test_metadata_is_in_the_result_and_in_the_observation() -> None:
    async with serve() as server, open_socket(server) as socket:
        result = json.loads(await send(socket, {"type": "reset", "data": {"note": "k"}}))["data"]
        assert result["metadata"] == result["observation"]["metadata"] == {"note": "k"}


async def test_close_gets_no_reply_and_the_socket_closes() -> None:
    async with serve() as server, open_socket(server) as socket:
        await socket.send('{"type":"close"}')
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1000


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        ("{", "INVALID_JSON", "Invalid JSON: "),
        ({"type": "bogus"}, "UNKNOWN_TYPE", "Unknown message type: bogus"),
        ({}, "UNKNOWN_TYPE", "Unknown message type: "),
        ({"type": "step", "data": {"add": 13}}, "EXECUTION_ERROR", "unlucky"),
        ({"type": "step", "data": {"add": "x"}}, "VALIDATION_ERROR", "Invalid message"),
        ({"type": "step"}, "VALIDATION_ERROR", "Invalid message"),
        ({"type": "state", "request_id": "r1"}, "VALIDATION_ERROR", "Invalid message"),
        ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR", "Invalid message"),
        (
            {"type": "step", "data": {"add": 1}, "step_index": 1},
            "VALIDATION_ERROR",
            "Invalid message",
        ),
        ({"type": "step", "data": {"add": 0}}, "ILLEGAL_ACTION", "expected to add something"),
    ],
)
async def test_invalid_message_gets_an_error_reply_and_the_session_continues(
    message, code: str, text
) -> None:
    async with serve() as server, open_socket(server) as socket:
        await send(socket, {"type": "reset"})
        reply = json.loads(await send(socket, message))
        assert reply["type"] == "error"
        assert reply["data"]["code"] == code
        assert reply["data"]["message"].startswith(text)
        assert '"total":1' in await send(socket, {"type": "step", "data": {"add": 1}})


async def test_extra_key_error_has_the_pydantic_format() -> None:
    async with serve() as server, open_socket(server) as socket:
        reply = await send(socket, {"type": "state", "request_id": "r1"})
        error = json.loads(reply)["data"]["errors"][0]
        assert error.pop("url").startswith("https://errors.pydantic.dev/")
        assert error == {
            "type": "extra_forbidden",
            "loc": ["request_id"],
            "msg": "Extra inputs are not permitted",
            "input": "r1",
        }


@pytest.mark.parametrize("message", [b"\x00", "[1]"])
async def test_malformed_message_ends_the_session(message) -> None:
    async with serve() as server, open_socket(server) as socket:
        assert json.loads(await send(socket, message))["data"]["code"] == "SESSION_ERROR"
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert (socket.close_code, server.core.load.num_sessions) == (1000, 0)


async def test_full_server_accepts_the_socket_and_then_refuses_the_session() -> None:
    async with (
        serve(max_sessions=1) as server,
        open_socket(server),
        open_socket(server) as next_socket,
    ):
        assert await next_socket.recv() == (
            '{"type":"error","data":{"message":"Server at capacity: 1/1 sessions active.'
            ' Cannot accept new connections.","code":"CAPACITY_REACHED",'
            '"active_sessions":1,"max_sessions":1}}'
        )
        with pytest.raises(ConnectionClosed):
            await next_socket.recv()
        assert next_socket.close_code == 1000


async def test_failed_factory_error_contains_the_environment_name() -> None:
    builds = []

    def build_once():
        if builds:
            raise OSError("no disk")
        builds.append(True)
        return CountingEnv()

    async with serve(build_once) as server, open_socket(server) as socket:
        assert await socket.recv() == (
            '{"type":"error","data":{"message":"Environment factory \'counting\' failed to create'
            ' instance.","code":"FACTORY_ERROR","factory_name":"counting"}}'
        )


async def test_ludus_client_gets_extra_fields_next_to_the_observation() -> None:
    async with serve() as server, open_socket(server, "?ludus=1") as socket:
        await send(socket, {"type": "reset", "data": {"seed": 5}})
        step_message = {"type": "step", "text": "ADD 2", "step_index": 1}
        reply = await send(socket, step_message)
        assert json.loads(reply)["data"] == {
            "observation": {"metadata": {}, "total": 2, "luck": 267853},
            "reward": 2.0,
            "done": False,
            "terminated": False,
            "truncated": False,
            "step_index": 1,
            "info": {"added": 2},
            "text": {
                "messages": [{"role": "user", "content": "Total 2."}],
                "legal_answers": ["ADD 1", "ADD 2", "ADD 3"],
            },
        }
        assert await send(socket, step_message) == reply


async def test_mcp_messages_get_an_error_if_the_environment_has_no_mcp() -> None:
    async with serve() as server, open_socket(server) as socket:
        call = {"jsonrpc": "2.0", "id": 9, "method": "tools/list", "params": {}}
        reply = json.loads(await send(socket, {"type": "mcp", "data": call}))
        assert (reply["type"], reply["data"]["id"]) == ("mcp", 9)
        assert reply["data"]["error"]["message"] == "Environment does not support MCP"


async def test_a_dropped_connection_leaves_no_session(factory) -> None:
    async with serve(factory) as server:
        socket = await open_socket(server)
        await send(socket, {"type": "reset"})
        socket.transport.abort()
        await wait_for_sessions(server.core, 0)


def send_request(server, path: str, body=None, method: str | None = None):
    payload = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(server.http_address + path, payload, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        body = error.read().decode()
        return error.code, json.loads(body) if body.startswith(("{", "[")) else body


async def test_http_endpoints_respond_like_openenv() -> None:
    def check_endpoints() -> None:
        expected_result = {"observation": {"metadata": {}, "total": 5, "luck": 653159}}
        response = send_request(server, "/reset", {"seed": 5, "start": 5, "unknown": 1})
        assert response == (200, {**expected_result, "reward": None, "done": False})
        assert send_request(server, "/reset", method="POST")[0] == 200
        status, result = send_request(server, "/step", {"action": {"add": 2}, "timeout_s": 30.0})
        assert (status, result["reward"], result["observation"]["total"]) == (200, 2.0, 2)
        assert send_request(server, "/state") == (200, {"episode_id": None, "step_count": 0})
        status, error = send_request(server, "/step", {"action": {"add": "x"}})
        assert (status, error["detail"][0]["loc"]) == (422, ["add"])
        assert send_request(server, "/reset", {"seed": -1})[0] == 422
        status, error = send_request(server, "/step", {"action": {"add": 13}})
        assert (status, error["detail"]["code"]) == (500, "EXECUTION_ERROR")
        assert send_request(server, "/health") == (200, {"status": "healthy"})
        assert send_request(server, "/healthz")[0] == send_request(server, "/readyz")[0] == 200
        schema = send_request(server, "/schema")[1]
        assert set(schema) == {"action", "observation", "state", "reset_observation"}
        metadata = send_request(server, "/metadata")[1]
        assert (metadata["name"], metadata["description"]) == ("counting", "Counts.")
        openapi = send_request(server, "/openapi.json")[1]
        assert openapi["info"]["version"] == "1.0.0"
        assert {"/reset", "/step", "/state"} <= set(openapi["paths"])

    async with serve() as server:
        await asyncio.to_thread(check_endpoints)


async def test_token_protects_endpoints_except_probes() -> None:
    def check_endpoints() -> None:
        assert [send_request(server, path)[0] for path in ("/health", "/readyz")] == [200, 200]
        status, error = send_request(server, "/metadata")
        assert (status, error["detail"]["code"]) == (401, "UNAUTHENTICATED")

    async with serve(token="secret") as server:
        await asyncio.to_thread(check_endpoints)


async def test_equivalent_messages_get_equal_results_and_invalid_seeds_fail(factory) -> None:
    step_message = {"type": "step", "text": "ADD 2", "step_index": 1}
    async with serve(factory) as server, open_socket(server, "?ludus=1") as socket:
        for options in ({"seed": 5}, {"seed": "5"}, {"seed": 5, "start": 0}):
            reset_message = {"type": "reset", "data": options}
            first_result = json.loads(await send(socket, reset_message))["data"]
            result = json.loads(await send(socket, step_message))["data"]
            assert (first_result["step_index"], first_result["observation"]["luck"]) == (0, 653159)
            assert (result["reward"], result["observation"]["luck"]) == (2.0, 267853)
            repeated_result = json.loads(await send(socket, step_message | {"data": None}))["data"]
            assert repeated_result == result
        for seed in (True, -1, 2**64, 1.5):
            response = json.loads(await send(socket, {"type": "reset", "data": {"seed": seed}}))
            assert (response["type"] == "error") == (seed is not True)

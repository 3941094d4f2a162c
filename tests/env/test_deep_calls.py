"""Calls with JSON that is nested too deeply are refused, and the next call succeeds."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest

from ludus.proto.env.v1 import env_pb2 as pb
from tests.env.raw_stream import RawStream
from tests.env.served import serve
from tests.env.tool_env import ToolEnv
from tests.gateway.gateways import run_gateway

NUM_LEVELS = 300
DEEP_JSON = b'{"text":' + b"[" * NUM_LEVELS + b"]" * NUM_LEVELS + b"}"
HOST_OPTIONS: list[dict[str, Any]] = [{}, {"isolation": "pool", "num_workers": 1}]


async def assert_deep_calls_are_refused(address: str) -> None:
    async with RawStream(address) as stream:
        session_id = await stream.open(reset=pb.ResetArgs(seed=1))

        def make_tool_call(arguments: bytes) -> pb.Call:
            call = pb.CallToolRequest(session_id=session_id, name="note", arguments_json=arguments)
            return pb.Call(call_id=3, call_tool=call)

        reset = pb.ResetRequest(session_id=session_id, args=pb.ResetArgs(options_json=DEEP_JSON))
        for call in (make_tool_call(DEEP_JSON), pb.Call(call_id=4, reset=reset)):
            reply = await stream.ask(call)
            assert reply.error.code == "VALIDATION_ERROR"
            assert "254 levels" in reply.error.message
        reply = await stream.ask(make_tool_call(b'{"text":"hello"}'))
        assert orjson.loads(reply.call_tool.result_json) == {"notes": ["hello"]}


@pytest.mark.slow
@pytest.mark.parametrize("options", HOST_OPTIONS)
async def test_deeply_nested_calls_are_refused_over_grpc(
    options: dict[str, Any],
) -> None:
    async with serve(ToolEnv, **options) as server:
        await assert_deep_calls_are_refused(server.grpc_address)


@pytest.mark.slow
async def test_deeply_nested_calls_are_refused_through_a_gateway() -> None:
    async with run_gateway(factory=ToolEnv) as (gateway, _):
        await assert_deep_calls_are_refused(gateway.grpc_address)


@pytest.mark.slow
@pytest.mark.parametrize("options", HOST_OPTIONS)
async def test_deeply_nested_tool_arguments_are_refused_over_http(options: dict[str, Any]) -> None:
    headers = {"content-type": "application/json"}
    async with (
        serve(ToolEnv, **options) as server,
        httpx.AsyncClient(base_url=server.http_address, timeout=60, headers=headers) as http,
    ):
        call = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"note","arguments":'
        response = (await http.post("/mcp", content=call + DEEP_JSON + b"}}")).json()
        assert response["result"]["isError"]
        assert "VALIDATION_ERROR" in response["result"]["content"][0]["text"]
        body = b'{"action":{"type":"call_tool","tool_name":"note","arguments":' + DEEP_JSON + b"}}"
        response = (await http.post("/step", content=body)).json()
        assert response["observation"]["error"]["error_type"] == "invalid_args"

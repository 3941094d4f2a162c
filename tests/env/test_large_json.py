"""JSON with too many values is refused before it is parsed, on every wire."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx
import orjson
import pytest
import websockets
from pydantic import ValidationError

from ludus.env.encoding import decode_action
from ludus.env.incoming.json_values import MAX_JSON_VALUES, has_too_many_values
from ludus.env.text import FieldsText
from ludus.env.types import Action
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import ActionParseError, InvalidCallError
from tests.env.raw_stream import RawStream
from tests.env.served import serve
from tests.env.tool_env import ToolEnv
from tests.gateway.gateways import NAME, run_gateway

JSON_HEADERS = {"content-type": "application/json"}
MANY_VALUES = b'{"k":[' + b",".join([b"0"] * MAX_JSON_VALUES) + b"]}"
MANY_KEYS = b"{" + b",".join(b'"%d":1' % number for number in range(MAX_JSON_VALUES)) + b"}"
LONG_TEXT = ',[{"\\\n' * 60_000


def make_list(element: bytes, num_elements: int) -> bytes:
    return b"[" + b",".join([element] * num_elements) + b"]"


@pytest.mark.parametrize(
    "encoded_json",
    [
        orjson.dumps({"text": LONG_TEXT}),
        orjson.dumps({LONG_TEXT: LONG_TEXT}),
        orjson.dumps("\\" * 300_001 + "," * 100_000),
        orjson.dumps("\\\\" * 65_535 + '"' + "," * 100_000),
        orjson.dumps(['"' * 200_000, "," * 200_000, "\\" * 200_001]),
        make_list(b'"' + b"," * 40 + b'"', MAX_JSON_VALUES - 1),
        make_list(b"0", MAX_JSON_VALUES - 1),
        b" " * 1_000_000 + b"{}",
    ],
)
def test_strings_and_as_many_values_as_allowed_are_accepted(encoded_json: bytes) -> None:
    orjson.loads(encoded_json)
    assert not has_too_many_values(encoded_json)
    assert not has_too_many_values(encoded_json.decode())


@pytest.mark.parametrize(
    "encoded_json",
    [
        make_list(b"0", MAX_JSON_VALUES),
        make_list(b"[]", MAX_JSON_VALUES),
        make_list(b'{"a":1}', MAX_JSON_VALUES // 2),
        make_list(b'""', MAX_JSON_VALUES),
        make_list(b"\t null \n", MAX_JSON_VALUES),
        make_list(rb'"\\"', MAX_JSON_VALUES),
        make_list(rb'"\\\""', MAX_JSON_VALUES),
        orjson.dumps(["," * 65_534 + "\\", *[0] * MAX_JSON_VALUES]),
        orjson.dumps(["," * 65_533 + '\\"', *[0] * MAX_JSON_VALUES]),
        b"[" * 200_000,
        b"," * 200_000,
        b'"' * 600_000,
        MANY_KEYS,
        MANY_VALUES,
        b'{"text":"' + b"x" * 1_000_000 + b'",' + MANY_KEYS[1:],
    ],
)
def test_more_values_than_allowed_are_refused(encoded_json: bytes) -> None:
    assert has_too_many_values(encoded_json)
    assert has_too_many_values(encoded_json.decode())


@pytest.fixture
async def http() -> httpx.AsyncClient:
    async with (
        serve(ToolEnv) as server,
        httpx.AsyncClient(base_url=server.http_address, timeout=60, headers=JSON_HEADERS) as client,
    ):
        yield client


def get_socket_url(http: httpx.AsyncClient) -> str:
    return str(http.base_url).replace("http", "ws", 1).rstrip("/")


@pytest.mark.parametrize("content", [MANY_KEYS, MANY_VALUES])
@pytest.mark.parametrize("path", ["/step", "/reset"])
async def test_body_with_too_many_values_is_refused(
    http: httpx.AsyncClient, path: str, content: bytes
) -> None:
    for body in (content, b'{"action":' + content + b"}"):
        response = await http.post(path, content=body)
        assert response.status_code == 413
        assert response.json()["detail"]["code"] == "VALIDATION_ERROR"
        assert str(MAX_JSON_VALUES) in response.json()["detail"]["message"]
    assert (await http.post("/reset", content=b"{}")).status_code == 200


@pytest.mark.slow
async def test_gateway_refuses_body_with_too_many_values() -> None:
    async with run_gateway() as (gateway, _), httpx.AsyncClient(timeout=60) as client:
        url = f"{gateway.http_address}/envs/{NAME}"
        for path in ("/step", "/reset"):
            response = await client.post(url + path, content=MANY_KEYS, headers=JSON_HEADERS)
            assert response.status_code == 413
        response = await client.post(f"{url}/mcp", content=MANY_KEYS, headers=JSON_HEADERS)
        assert response.json()["error"]["code"] == -32600


@pytest.mark.parametrize("arguments", [MANY_KEYS, MANY_VALUES])
async def test_mcp_call_with_too_many_values_is_refused(
    http: httpx.AsyncClient, arguments: bytes
) -> None:
    call = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"note","arguments":'
    response = await http.post("/mcp", content=call + arguments + b"}}")
    assert response.json()["error"]["code"] == -32600
    async with websockets.connect(f"{get_socket_url(http)}/mcp") as socket:
        await socket.send((call + arguments + b"}}").decode())
        assert orjson.loads(await socket.recv())["error"]["code"] == -32600


@pytest.mark.parametrize("query", ["", "?ludus=1"])
async def test_frame_with_too_many_values_is_refused_and_the_session_continues(
    http: httpx.AsyncClient, query: str
) -> None:
    async with websockets.connect(f"{get_socket_url(http)}/ws{query}") as socket:

        async def ask(frame: bytes) -> dict:
            await socket.send(frame.decode())
            return orjson.loads(await socket.recv())

        assert (await ask(b'{"type":"reset","data":{"seed":1}}'))["type"] == "observation"
        for frame_type in (b"step", b"reset", b"mcp", b"unknown"):
            reply = await ask(b'{"type":"' + frame_type + b'","data":' + MANY_KEYS + b"}")
            assert reply["data"]["code"] == "VALIDATION_ERROR"
            assert str(MAX_JSON_VALUES) in reply["data"]["message"]
        assert (await ask(b'{"type":"state"}'))["type"] == "state"


def make_step(session_id: str, content: bytes) -> pb.Call:
    return pb.Call(call_id=3, step=pb.StepRequest(session_id=session_id, action_json=content))


def make_traced_step(session_id: str, content: bytes) -> pb.Call:
    call = make_step(session_id, content)
    call.trace.request_id = "r1"
    return call


def make_reset(session_id: str, content: bytes) -> pb.Call:
    args = pb.ResetArgs(options_json=content)
    return pb.Call(call_id=3, reset=pb.ResetRequest(session_id=session_id, args=args))


def make_open(session_id: str, content: bytes) -> pb.Call:
    return pb.Call(call_id=3, open=pb.OpenRequest(reset=pb.ResetArgs(options_json=content)))


def make_group(session_id: str, content: bytes) -> pb.Call:
    open_request = make_open(session_id, content).open
    return pb.Call(call_id=3, open_group=pb.OpenGroupRequest(open=open_request, size=2))


def make_tool_call(session_id: str, content: bytes) -> pb.Call:
    call = pb.CallToolRequest(session_id=session_id, name="note", arguments_json=content)
    return pb.Call(call_id=3, call_tool=call)


@pytest.mark.parametrize("content", [MANY_KEYS, MANY_VALUES])
async def test_grpc_call_with_too_many_values_is_refused(content: bytes) -> None:
    makers = (make_step, make_traced_step, make_reset, make_open, make_group, make_tool_call)
    async with serve(ToolEnv) as server, RawStream(server.grpc_address) as stream:
        session_id = await stream.open(reset=pb.ResetArgs(seed=1))
        for make_call in makers:
            reply = await stream.ask(make_call(session_id, content))
            assert reply.error.code == "VALIDATION_ERROR"
            assert str(MAX_JSON_VALUES) in reply.error.message


# -- faults --------------------------------------------------------------------------------------


class Move(Action):
    """An action with several required fields."""

    first: int
    second: int
    third: int


def make_unknown_fields(num_fields: int) -> bytes:
    fields = b"".join(b',"x%d":1' % number for number in range(num_fields))
    return b'{"first":1,"second":2,"third":3' + fields + b"}"


@pytest.mark.parametrize(
    ("action_json", "text"),
    [
        (make_unknown_fields(3), "x2: Extra inputs are not permitted, got 1"),
        (make_unknown_fields(30), "; and 10 more"),
        (make_unknown_fields(30_000), "30000 values or keys are invalid"),
        (make_unknown_fields(60_000), "60000 values or keys are invalid"),
        (b'{"text":"' + b"x" * 1_000_000 + b'"}', "first: Field required"),
        (b'{"first":"' + b"x" * 1_000_000 + b'"}', "first: Input should be a valid integer"),
        (b'{"first":"' + b"x" * 60_000 + b'"}', "xxx'..."),
        (b'{"' + b"x" * 1_000_000 + b'":1}', "xxx...: Extra inputs"),
        (b'{"first":' + make_list(b"1", 60_000) + b"}", "first: Input should be a valid integer"),
    ],
)
def test_message_for_an_invalid_action_is_short(action_json: bytes, text: str) -> None:
    with pytest.raises(InvalidCallError) as raised:
        decode_action(Move, action_json)
    assert text in raised.value.message
    assert len(raised.value.message) < 4000


def test_cause_of_an_invalid_small_action_is_kept() -> None:
    with pytest.raises(InvalidCallError) as raised:
        decode_action(Move, make_unknown_fields(3))
    assert isinstance(raised.value.__cause__, ValidationError)


async def ask_over_http(address: str, fields: bytes) -> httpx.Response:
    async with httpx.AsyncClient(base_url=address, timeout=60, headers=JSON_HEADERS) as http:
        return await http.post("/step", content=b'{"action":{"add":1,' + fields + b"}}")


async def ask_over_websocket(address: str, fields: bytes) -> str:
    async with websockets.connect(f"ws{address[4:]}/ws") as socket:
        await socket.send('{"type":"reset","data":{}}')
        await socket.recv()
        await socket.send('{"type":"step","data":{"add":1,' + fields.decode() + "}}")
        step_reply = await socket.recv()
        await socket.send('{"type":"state",' + fields.decode() + "}")
        return f"{step_reply} {await socket.recv()}"


@pytest.mark.parametrize("ask", [ask_over_http, ask_over_websocket])
@pytest.mark.parametrize("num_fields", [1, 100, 1001, pytest.param(50_000, marks=pytest.mark.slow)])
async def test_reply_to_an_action_with_unknown_fields_is_short(
    ask: Callable[[str, bytes], Awaitable[httpx.Response | str]], num_fields: int
) -> None:
    fields = b",".join(b'"x%d":1' % number for number in range(num_fields))
    async with serve() as server:
        reply = await ask(server.http_address, fields)
    if isinstance(reply, httpx.Response):
        assert reply.status_code == 422
    text = reply if isinstance(reply, str) else reply.text
    assert len(text) < 100_000
    assert ("Extra inputs" if num_fields < 1000 else f"{num_fields} values or keys") in text


async def test_reply_to_faults_that_each_repeat_a_large_input_is_short() -> None:
    frame = '{"type":"step","a":0,"text":"' + "x" * 1_000_000 + '"}'
    async with serve() as server, websockets.connect(f"ws{server.http_address[4:]}/ws") as socket:
        await socket.send(frame)
        reply = await socket.recv()
    assert "Field required" in reply
    assert len(reply) < 2000


# -- answers of language models ------------------------------------------------------------------


@pytest.mark.parametrize("answer", [MANY_VALUES, MANY_KEYS, make_list(b"[]", MAX_JSON_VALUES)])
def test_answer_with_too_many_values_is_not_an_action(answer: bytes) -> None:
    text = FieldsText("sums", {"properties": {"numbers": {"type": "array"}}})
    with pytest.raises(ActionParseError, match="at most 65536 values"):
        text.parse(answer.decode(), {})

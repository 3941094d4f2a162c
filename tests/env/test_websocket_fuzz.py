"""Fuzz tests of the WebSocket endpoints: random messages and unclean disconnects."""

import asyncio
import json
import logging
import random

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from ludus.env.http.app import build_app
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import ErrorCode
from tests.env.counting_env import CountingEnv
from tests.env.polling import wait_for_sessions, wait_until
from tests.env.served import serve
from tests.env.served_app import make_core, serve_app
from tests.env.tool_env import ToolEnv

pytestmark = pytest.mark.slow

TOKEN = "hush-hush-do-not-tell"
BEARER = {"authorization": f"Bearer {TOKEN}"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda items: st.lists(items, max_size=4) | st.dictionaries(st.text(max_size=8), items),
    max_leaves=12,
)
message_types = st.sampled_from(["reset", "step", "state", "mcp", "close", "bogus", "", None, 3])
envelopes = st.fixed_dictionaries(
    {"type": message_types},
    optional={
        "data": json_values
        | st.fixed_dictionaries({"add": json_values})
        | st.fixed_dictionaries({"seed": json_values, "start": st.integers()})
        | st.fixed_dictionaries(
            {"type": st.sampled_from(["list_tools", "call_tool"])},
            optional={"tool_name": json_values, "arguments": json_values},
        ),
        "step_index": json_values,
        "text": json_values,
        "extra": json_values,
    },
)
METHODS = [
    "initialize",
    "ping",
    "tools/list",
    "tools/call",
    "openenv/session/create",
    "openenv/session/close",
    "notifications/initialized",
    "x",
]
methods = st.sampled_from(METHODS)
calls = st.fixed_dictionaries(
    {"jsonrpc": st.sampled_from(["2.0", "2.0", "2.0", "1.0", None])},
    optional={
        "id": json_values,
        "method": methods | json_values,
        "params": json_values
        | st.fixed_dictionaries(
            {},
            optional={
                "name": st.sampled_from(["note", "fail", "take_action", "start_episode", 1]),
                "arguments": json_values | st.fixed_dictionaries({"seed": json_values}),
                "session_id": json_values,
            },
        ),
    },
)
MALFORMED_FRAMES = [
    "",
    "\x00",
    "null",
    "[" * 5000,
    '{"type":"step","data":' + '{"add":' * 300 + "1" + "}" * 301,
    '{"type":"step","data":' + '{"add":' * 900 + "1" + "}" * 901,
    '{"type":"reset","data":{"note":' + "[" * 500 + "]" * 500 + "}}",
    '{"type":"step","data":{"add":1},"data":{"add":2}}',
    '{"type":"step","data":{"add":1,"add":"x"}}',
    '{"type":"step","data":{"add":NaN}}',
    '{"type":"step","data":{"add":Infinity}}',
    '{"type":"step","data":{"add":1e400}}',
    '{"type":"step","data":{"add":' + "9" * 5000 + "}}",
    '{"type":"reset","data":{"seed":' + "9" * 30 + "}}",
    '{"type":"reset","data":{"note":"\\ud800"}}',
    '{"type":"reset","data":{"episode_id":"' + "e" * 300 + '"}}',
    '{"type":"' + "t" * 100_000 + '"}',
    '{"type":"step","data":{"add":"' + "x" * 2_000_000 + '"}}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","id":1,"method":"' + "m" * 100_000 + '"}}',
    b"\x00\xff",
    b"",
]
frames = (
    envelopes.map(lambda message: json.dumps(message))
    | calls.map(lambda call: json.dumps({"type": "mcp", "data": call}))
    | calls.map(lambda call: json.dumps(call))
    | json_values.map(lambda value: json.dumps(value))
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.sampled_from(MALFORMED_FRAMES)
)
fuzz_settings = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


def has_known_type(reply: dict) -> bool:
    """Return True if the reply has a known type and, for an error, a known code."""
    if "jsonrpc" in reply:
        return "result" in reply or isinstance(reply["error"]["code"], int)
    if reply["type"] == "error":
        return reply["data"]["code"] in set(ErrorCode)
    return reply["type"] in {"observation", "state", "mcp"}


async def send_frames(server, path: str, messages: list[str | bytes]) -> None:
    """Send the frames and check the responses. Each frame may close the socket."""
    url = server.http_address.replace("http", "ws") + path
    async with connect(url, additional_headers=BEARER, compression=None) as socket:
        try:
            for message in messages:
                await socket.send(message)
                # A pong before any response shows that the frame gets no response.
                response_task = asyncio.ensure_future(socket.recv())
                pong = await socket.ping()
                await asyncio.wait({response_task, pong}, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({response_task}, timeout=0.02)
                if not response_task.done():
                    response_task.cancel()
                    continue
                text = response_task.result()
                assert has_known_type(json.loads(text)), text
                assert TOKEN not in text
        except ConnectionClosed:
            assert socket.close_code in (1000, 1007, 1009), socket.close_reason
            assert TOKEN not in socket.close_reason


@pytest.mark.parametrize("path", ["/ws", "/ws?ludus=1", "/mcp"])
@given(messages=st.lists(frames, min_size=1, max_size=6))
@fuzz_settings
async def test_any_frames_get_typed_responses_and_leak_no_sessions(
    error_log, path: str, messages
) -> None:
    async with serve(ToolEnv, token=TOKEN, max_sessions=2) as server:
        await send_frames(server, path, messages)
        await wait_for_closed_sessions(server, messages)
        url = server.http_address.replace("http", "ws") + "/ws"
        async with connect(url, additional_headers=BEARER) as socket:
            await socket.send('{"type":"reset"}')
            assert '"total":0' in await socket.recv()
    assert TOKEN not in error_log.text
    assert "Exception in ASGI application" not in error_log.text


async def wait_for_closed_sessions(server, messages) -> None:
    """Wait until all sessions are closed, unless the messages create sessions over MCP."""
    if any("openenv/session/create" in str(message) for message in messages):
        return
    await wait_for_sessions(server.core, 0)


@pytest.fixture
def error_log(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.ERROR)
    return caplog


@pytest.mark.parametrize("frame", MALFORMED_FRAMES, ids=range(len(MALFORMED_FRAMES)))
async def test_malformed_frame_does_not_affect_other_connections(frame) -> None:
    core = make_core(CountingEnv)
    async with (
        serve_app(build_app(core)) as authority,
        connect(f"ws://{authority}/ws") as other_socket,
        connect(f"ws://{authority}/ws") as socket,
    ):
        await other_socket.send('{"type":"reset"}')
        await other_socket.recv()
        await socket.send('{"type":"reset"}')
        await socket.recv()
        await socket.send(frame)
        reply = json.loads(await asyncio.wait_for(socket.recv(), 60))
        assert has_known_type(reply)
        assert len(json.dumps(reply)) < 200_000, "the reply repeats the whole input"
        if reply["type"] == "error" and reply["data"]["code"] != "SESSION_ERROR":
            await socket.send('{"type":"step","data":{"add":1}}')
            assert '"reward":1.0' in await socket.recv()
        await other_socket.send('{"type":"step","data":{"add":1}}')
        assert '"total":1' in await other_socket.recv()


async def test_oversized_message_closes_the_connection_and_the_session() -> None:
    core = make_core(CountingEnv)
    async with (
        serve_app(build_app(core)) as authority,
        connect(f"ws://{authority}/ws", compression=None) as socket,
    ):
        with pytest.raises(ConnectionClosed):
            await socket.send(['{"type":"', *["x" * 1024 * 1024] * 17])
            await socket.recv()
        assert socket.close_code == 1009
        await wait_for_sessions(core, 0)


HANDSHAKE = (
    b"GET %s HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
RESET_FRAME = b'\x81\x90\x00\x00\x00\x00{"type":"reset"}'


async def open_and_drop_socket(host: str, port: int, generator: random.Random) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(HANDSHAKE % generator.choice((b"/ws", b"/ws?ludus=1", b"/mcp")))
    num_phases = generator.randrange(4)
    if num_phases >= 1:
        await reader.readuntil(b"\r\n\r\n")
    if num_phases >= 2:
        writer.write(RESET_FRAME[: 22 if num_phases == 3 else 9])
    if num_phases == 3:
        await reader.read(1)
    writer.transport.abort()


async def open_and_drop_stream(stub, generator: random.Random) -> None:
    stream = stub.Connect()
    open_call = pb.Call(call_id=1, open=pb.OpenRequest())
    await stream.write(pb.CallBatch(calls=[open_call]))
    if generator.random() < 0.5:
        await stream.read()
    stream.cancel()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_drops", [500, 5_000])
async def test_unclean_disconnects_leave_no_sessions(num_drops) -> None:
    num_tasks = 16
    async with serve(max_sessions=1000) as server:
        host, port = server.http_address.removeprefix("http://").split(":")
        address = server.grpc_address.removeprefix("grpc://")
        generator = random.Random(0)
        indices = iter(range(num_drops))
        async with grpc.aio.insecure_channel(address) as channel:
            stub = env_pb2_grpc.EnvServiceStub(channel)

            async def drop_many() -> None:
                for index in indices:
                    if index % 5 == 0:
                        await open_and_drop_stream(stub, generator)
                    else:
                        await open_and_drop_socket(host, int(port), generator)

            await asyncio.gather(*(drop_many() for _ in range(num_tasks)))
            await wait_for_sessions(server.core, 0)
        assert server.core.counts.num_opens > num_drops / 3
        await wait_until(lambda: count_connections() < 50)  # the server closes connections later


def count_connections() -> int:
    return sum("run_asgi" in repr(task) for task in asyncio.all_tasks())

"""Size limits of successive hops: a hop accepts every message that the previous hop accepts.

    client --> gateway --> server --> worker
    client --------------> server --> thread

In every test, a step of another session waits at a gate and must complete at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import httpx
import orjson
import pytest
import websockets

from ludus.env import Transition
from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.limits import (
    MAX_GATEWAY_CALL_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SERVER_MESSAGE_BYTES,
    MAX_WORKER_CALL_BYTES,
)
from ludus.env.messages.protobuf import fill_step, make_attempt_id
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import EnvError, ErrorCode
from tests.env.counting_env import CountAction, CountObservation, Gate, GatedCountingEnv
from tests.env.polling import wait_until
from tests.env.raw_stream import RawStream
from tests.gateway.gateways import NAME, run_gateway

pytestmark = pytest.mark.slow

HOST_OPTIONS: dict[str, dict[str, Any]] = {
    "threads": {},
    "pool": {"isolation": "pool", "num_workers": 1},
}
TARGETS = ("server", "gateway")
GATED_ADDEND = 98
JSON_HEADERS = {"content-type": "application/json"}
EXTRA_LENGTH_BYTES = 9
"""Extra bytes of three length fields that need four bytes instead of one."""


class PaddedAction(CountAction):
    """An action with a number and a payload."""

    load: Any = None


class PaddedEnv(GatedCountingEnv):
    """A counting environment that ignores the payload."""

    action_type = PaddedAction

    def reset(self, *, seed: int | None = None, load: str = "") -> Transition[CountObservation]:
        return super().reset(seed=seed)


@pytest.fixture
def gate(tmp_path) -> Gate:
    folder = tmp_path / "gate"
    folder.mkdir()
    gate = Gate(folder)
    gate.factory = partial(PaddedEnv, folder=str(folder))
    return gate


@asynccontextmanager
async def run_with_waiting_step(gate: Gate, host: str, target: str) -> AsyncIterator[Any]:
    """Run a server, optionally behind a gateway, with a step that waits until the context exits."""
    options = HOST_OPTIONS[host] | {"allow_write": (gate.folder,)}
    async with run_gateway(factory=gate.factory, server_options=options) as (gateway, (server,)):
        address = gateway if target == "gateway" else server
        async with RawStream(address.grpc_address) as stream:
            waiting_session_id = await stream.open(reset=pb.ResetArgs(seed=1))
            step = pb.StepRequest(
                session_id=waiting_session_id, action_json=b'{"add":%d}' % GATED_ADDEND
            )
            await stream.call.write(pb.CallBatch(calls=[pb.Call(call_id=7, step=step)]))
            await wait_until(lambda: gate.num_entered)
            yield address
            gate.open()
            (reply,) = (await stream.call.read()).replies
            assert reply.result.step_index == 1, reply.error


def get_http_address(target: Any) -> str:
    address: str = target.http_address
    return f"{address}/envs/{NAME}" if hasattr(target, "environments") else address


def make_padded_action(num_bytes: int) -> dict[str, Any]:
    return {"add": 1, "load": "x" * num_bytes}


def count_grpc_bytes(session: AsyncSession, step_index: int, action: dict[str, Any]) -> int:
    step = pb.StepRequest()
    fill_step(step, session.id, orjson.dumps(action), step_index, make_attempt_id())
    return pb.Call(call_id=1, step=step).ByteSize()


def count_websocket_bytes(session: AsyncSession, step_index: int, action: dict[str, Any]) -> int:
    return len(orjson.dumps({"type": "step", "data": action, "step_index": step_index}))


SIZE_FUNCTIONS = {"grpc": count_grpc_bytes, "http": count_websocket_bytes}


async def read_step_outcome(session: AsyncSession, action: dict[str, Any]) -> str:
    try:
        await session.step(action)
    except EnvError as error:
        return error.code
    return "answered"


@pytest.mark.parametrize("wire", SIZE_FUNCTIONS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("host", HOST_OPTIONS)
async def test_call_at_the_limit_passes_every_hop_and_larger_call_is_refused(
    host: str, target: str, wire: str, gate: Gate
):
    async with run_with_waiting_step(gate, host, target) as address:
        address = address.grpc_address if wire == "grpc" else get_http_address(address)
        async with await AsyncEnvClient.connect(address) as client:
            session, _ = await client.open(seed=1)
            num_frame_bytes = (
                SIZE_FUNCTIONS[wire](session, 1, make_padded_action(MAX_MESSAGE_BYTES))
                - MAX_MESSAGE_BYTES
            )
            codes = [
                await read_step_outcome(
                    session, make_padded_action(MAX_MESSAGE_BYTES - num_frame_bytes + num_extra)
                )
                for num_extra in (-1, 0, 1)
            ]
            assert codes == ["answered", "answered", ErrorCode.VALIDATION_ERROR]
            assert (await session.step({"add": 1})).observation["total"] == 3


def make_step_body(num_bytes: int) -> bytes:
    num_frame_bytes = len(orjson.dumps({"action": make_padded_action(0)}))
    return orjson.dumps({"action": make_padded_action(num_bytes - num_frame_bytes)})


def make_mcp_body(num_bytes: int) -> bytes:
    def make_body(num_payload_bytes: int) -> bytes:
        call = {"name": "take_action", "arguments": make_padded_action(num_payload_bytes)}
        return orjson.dumps({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call})

    return make_body(num_bytes - len(make_body(0)))


async def send_http_steps(http: httpx.AsyncClient, base_url: str, sizes: list[int]) -> list[int]:
    reset_response = await http.post(f"{base_url}/reset", json={"seed": 1})
    headers = JSON_HEADERS | {"x-session-id": reset_response.headers["x-session-id"]}
    responses = [
        await http.post(f"{base_url}/step", content=make_step_body(n), headers=headers)
        for n in sizes
    ]
    return [response.status_code for response in responses]


async def send_mcp_steps(http: httpx.AsyncClient, base_url: str, sizes: list[int]) -> list[int]:
    initialize = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    session_id = (await http.post(f"{base_url}/mcp", json=initialize)).headers["mcp-session-id"]
    headers = JSON_HEADERS | {"mcp-session-id": session_id}
    call = {"name": "start_episode", "arguments": {}}
    start_call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
    await http.post(f"{base_url}/mcp", json=start_call, headers=headers)
    responses = [
        await http.post(f"{base_url}/mcp", content=make_mcp_body(n), headers=headers) for n in sizes
    ]
    successful_responses = [response for response in responses if response.status_code == 200]
    assert not any(response.json()["result"]["isError"] for response in successful_responses)
    return [response.status_code for response in responses]


@pytest.mark.parametrize("send_steps", [send_http_steps, send_mcp_steps])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("host", HOST_OPTIONS)
async def test_body_at_the_limit_passes_every_hop_and_larger_body_is_refused(
    host: str, target: str, send_steps: Any, gate: Gate
):
    sizes = [MAX_MESSAGE_BYTES - 1, MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + 1]
    async with (
        run_with_waiting_step(gate, host, target) as address,
        httpx.AsyncClient(timeout=60) as http,
    ):
        assert await send_steps(http, get_http_address(address), sizes) == [200, 200, 413]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("host", HOST_OPTIONS)
async def test_reset_options_up_to_the_limit_pass_every_hop(host: str, target: str, gate: Gate):
    async with (
        run_with_waiting_step(gate, host, target) as address,
        await AsyncEnvClient.connect(address.grpc_address) as client,
    ):
        session, _ = await client.open(seed=1)

        async def read_reset_outcome(num_extra: int) -> str:
            empty_args = pb.ResetArgs(seed=1, options_json=orjson.dumps({"load": ""}))
            call = pb.Call(call_id=1, reset=pb.ResetRequest(session_id=session.id, args=empty_args))
            num_free_bytes = MAX_MESSAGE_BYTES - call.ByteSize() - EXTRA_LENGTH_BYTES
            try:
                await session.reset(seed=1, options={"load": "x" * (num_free_bytes + num_extra)})
            except EnvError as error:
                return error.code
            return "answered"

        codes = [await read_reset_outcome(num_extra) for num_extra in (-1, 0, 1)]
        assert codes == ["answered", "answered", ErrorCode.VALIDATION_ERROR]
        await session.reset(seed=1)
        assert (await session.step({"add": 3})).observation["total"] == 3


@pytest.mark.parametrize("target", TARGETS)
async def test_too_large_message_ends_only_that_stream(target: str, gate: Gate):
    max_bytes = MAX_GATEWAY_CALL_BYTES if target == "gateway" else MAX_SERVER_MESSAGE_BYTES
    async with (
        run_with_waiting_step(gate, "threads", target) as address,
        RawStream(address.grpc_address) as stream,
    ):
        session_id = await stream.open(reset=pb.ResetArgs(seed=1))

        def make_batch(num_bytes: int) -> pb.CallBatch:
            step = pb.StepRequest(
                session_id=session_id, action_json=orjson.dumps(make_padded_action(num_bytes))
            )
            return pb.CallBatch(calls=[pb.Call(call_id=9, step=step)])

        num_frame_bytes = make_batch(max_bytes).ByteSize() - max_bytes
        for num_extra in (-1, 0):
            await stream.call.write(make_batch(max_bytes - num_frame_bytes + num_extra))
            (reply,) = (await stream.call.read()).replies
            assert reply.HasField("result"), reply.error
        await stream.call.write(make_batch(max_bytes - num_frame_bytes + 1))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.call.read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def make_growing_frame(num_bytes: int) -> str:
    """Build a frame whose numbers grow at least fourfold when a hop encodes them again."""
    numbers = ",".join(["1e15"] * (num_bytes // 5))
    return '{"type":"step","data":{"add":1,"load":[' + numbers + "]}}"


@pytest.mark.parametrize(("host", "target"), [("threads", "gateway"), ("pool", "server")])
async def test_only_the_call_that_exceeds_the_next_limit_is_refused(
    host: str, target: str, gate: Gate
):
    async with run_with_waiting_step(gate, host, target) as address:
        url = get_http_address(address).replace("http://", "ws://") + "/ws"
        async with websockets.connect(url, max_size=None) as socket:
            await socket.send('{"type":"reset","data":{"seed":1}}')
            await socket.recv()
            await socket.send(make_growing_frame(MAX_WORKER_CALL_BYTES // 2))
            refusal = orjson.loads(await socket.recv())
            assert (refusal["type"], refusal["data"]["code"]) == ("error", "VALIDATION_ERROR")
            assert "must have at most" in refusal["data"]["message"]
            await socket.send('{"type":"step","data":{"add":1}}')
            assert orjson.loads(await socket.recv())["data"]["observation"]["total"] == 1


@pytest.mark.parametrize("host", HOST_OPTIONS)
async def test_concurrent_large_calls_pass_every_hop(host: str, gate: Gate):
    async with (
        run_with_waiting_step(gate, host, "gateway") as address,
        await AsyncEnvClient.connect(address.grpc_address) as client,
    ):
        sessions = [session for session, _ in await client.open_group(4, seed=1)]
        action = make_padded_action(MAX_MESSAGE_BYTES - 1024)
        results = await asyncio.gather(*(session.step(action) for session in sessions))
        assert [result.step_index for result in results] == [1] * len(sessions)

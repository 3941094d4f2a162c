"""A step that failed is not taken again when its call is repeated after a broken connection."""

from __future__ import annotations

import asyncio
import json

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.encoding import ResetArgs
from ludus.env.recording.format import read_recording
from ludus.env.sandbox.confine import Layer
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import make_local_host
from ludus.env.sessions.interface import OpenArgs
from ludus.env.types import Transition
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import ErrorCode, ExecutionError
from ludus.services.gateway.gateway import Gateway
from tests.env.counting_env import CountAction, CountingEnv, CountObservation
from tests.env.flaky_proxy import FlakyProxy
from tests.env.polling import wait_until
from tests.env.raw_stream import RawStream
from tests.env.served import serve
from tests.env.test_websocket_wire import open_socket, send
from tests.gateway.gateways import KEY, make_config

pytestmark = pytest.mark.asyncio

ADD_1 = b'{"add": 1}'
UNLUCKY = b'{"add": 13}'


class FailingEnv(CountingEnv):
    """A counting environment that counts its failed steps in its total."""

    def step(self, action: CountAction) -> Transition[CountObservation]:
        if action.add == 13:
            self._state.total += 100
        return super().step(action)


class ThreadedFailingEnv(FailingEnv):
    """A failing environment that steps in the server's threads."""

    steps_on_event_loop = False


@pytest.fixture(params=[FailingEnv, ThreadedFailingEnv])
def factory(request):
    return request.param


async def read_total(core: SessionCore, session_id: str) -> int:
    return json.loads(await core.state(session_id))["total"]


async def test_a_repeated_attempt_raises_the_first_error(factory) -> None:
    core = SessionCore(make_local_host(factory))
    session_id = (await core.open(OpenArgs(ResetArgs(seed=1)))).session_id
    messages = []
    for _ in range(3):
        with pytest.raises(ExecutionError) as error_info:
            await core.step(session_id, UNLUCKY, 1, attempt_id=7)
        messages.append(error_info.value.message)
    assert len(set(messages)) == 1
    assert await read_total(core, session_id) == 100
    # Another attempt of the same step is taken, and so is a call without an id.
    for attempt_id in (8, 0, 0):
        with pytest.raises(ExecutionError):
            await core.step(session_id, UNLUCKY, 1, attempt_id=attempt_id)
    assert await read_total(core, session_id) == 400
    assert (await core.step(session_id, ADD_1, 1, attempt_id=9)).step_index == 1


async def test_client_repeats_a_failed_step_after_a_broken_connection(factory) -> None:
    async with serve(factory) as server, FlakyProxy(server.grpc_address) as proxy:
        client = await AsyncEnvClient.connect(proxy.address)
        async with client:
            session, _ = await client.open(seed=1, linger_s=30)
            proxy.blackhole_replies()
            step_task = asyncio.create_task(session.step({"add": 13}))
            errors = server.core.counts.num_errors_by_code
            await wait_until(lambda: errors[ErrorCode.EXECUTION_ERROR] == 1)
            proxy.cut()
            with pytest.raises(ExecutionError, match="unlucky"):
                await step_task
            assert (await session.state())["total"] == 100
            # A new call of the same step is taken.
            with pytest.raises(ExecutionError, match="unlucky"):
                await session.step({"add": 13})
            assert (await session.state())["total"] == 200


async def test_gateway_repeats_a_failed_step_of_an_old_client() -> None:
    async with serve(FailingEnv, session_key=KEY) as server:
        proxy = FlakyProxy(server.grpc_address)
        async with (
            proxy,
            Gateway(make_config(proxy.address)) as gateway,
            RawStream(gateway.grpc_address) as stream,
        ):
            session_id = await stream.open(reset=pb.ResetArgs(seed=1))
            proxy.blackhole_replies()
            step = pb.StepRequest(session_id=session_id, step_index=1, action_json=UNLUCKY)
            step_task = asyncio.create_task(stream.ask(pb.Call(step=step)))
            errors = server.core.counts.num_errors_by_code
            await wait_until(lambda: errors[ErrorCode.EXECUTION_ERROR] == 1)
            proxy.cut()
            assert (await step_task).error.code == "EXECUTION_ERROR"
            state = await stream.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
            assert json.loads(state.state.state_json)["total"] == 100


async def test_websocket_message_can_have_an_attempt_id(factory) -> None:
    async with serve(factory) as server, open_socket(server, "?ludus=1") as socket:
        await send(socket, {"type": "reset", "data": {"seed": 1}})
        step = {"type": "step", "data": {"add": 13}, "step_index": 1, "attempt_id": 2**52}
        replies = [json.loads(await send(socket, step)) for _ in range(2)]
        assert replies[0] == replies[1]
        assert replies[0]["data"]["code"] == "EXECUTION_ERROR"
        state = json.loads(await send(socket, {"type": "state"}))
        assert state["data"]["total"] == 100


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["process", "pool"])
async def test_failed_step_of_a_worker_is_not_repeated(isolation: str) -> None:
    options = {"isolation": isolation, "accept_missing": tuple(Layer)}
    async with serve(FailingEnv, **options) as server, RawStream(server.grpc_address) as stream:
        session_id = await stream.open(reset=pb.ResetArgs(seed=1))
        fields = {"session_id": session_id, "step_index": 1, "attempt_id": 3}
        step = pb.Call(step=pb.StepRequest(action_json=UNLUCKY, **fields))
        assert await stream.ask(step) == await stream.ask(step)
        state = await stream.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
        assert json.loads(state.state.state_json)["total"] == 100


async def test_a_repeated_error_is_recorded_once(factory, tmp_path) -> None:
    async with serve(factory, record=tmp_path) as server:
        session_id = (await server.core.open(OpenArgs(ResetArgs(seed=1)))).session_id
        for _ in range(3):
            with pytest.raises(ExecutionError):
                await server.core.step(session_id, UNLUCKY, 1, attempt_id=7)
        await server.core.close(session_id)
    (episode,) = read_recording(tmp_path)
    assert len(episode.steps) == 1

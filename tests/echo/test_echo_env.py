"""OpenEnv's echo, with its classes, rewards and tools."""

from __future__ import annotations

import asyncio
import importlib

import pytest

from echo_env import EchoAction, EchoEnv, EchoState, make_environment
from ludus.env.check import check_environment
from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.errors import EpisodeStateError, ErrorCode, ToolError


def test_every_rule_of_the_environment_contract_holds() -> None:
    check_environment(make_environment, seeds=range(3), num_steps=5).raise_if_failed()


def test_the_classes_are_found_as_the_documents_of_openenv_import_them() -> None:
    package = importlib.import_module("envs.echo_env")
    assert package.EchoAction(message="hi").message == "hi"
    assert package.EchoEnv.default_url == "http://localhost:8000"


@pytest.mark.parametrize(("message", "reward"), [("Hello, World!", 1.3), ("", 0.0), ("é" * 7, 0.7)])
def test_a_message_pays_a_tenth_of_its_length_and_never_ends_the_episode(
    message: str, reward: float
) -> None:
    environment = make_environment()
    environment.reset(seed=1, episode_id="e")
    for number in range(1, 4):
        echoed = environment.step(EchoAction(message=message))
        assert (echoed.reward, echoed.terminated, echoed.truncated) == (reward, False, False)
        assert echoed.observation.echoed_message == message
        assert echoed.observation.message_length == len(message)
        assert environment.state == EchoState(episode_id="e", step_count=number)


def test_a_message_before_the_reset_is_refused() -> None:
    with pytest.raises(EpisodeStateError) as refused:
        make_environment().step(EchoAction(message="hi"))
    assert refused.value.code == ErrorCode.NOT_RESET


def test_tools_echo_without_pay_and_say_what_they_take() -> None:
    environment = make_environment()
    environment.reset()
    assert environment.call_tool("echo_message", {"message": "hi"}) == {"result": "hi"}
    assert environment.call_tool("echo_with_length", {"message": "hi"}) == {
        "message": "hi",
        "length": 2,
    }
    assert environment.state.step_count == 0
    for arguments in ({}, {"message": 3}, {"message": "hi", "loud": True}):
        with pytest.raises(ToolError, match="expected a text as `message`"):
            environment.call_tool("echo_message", arguments)
    with pytest.raises(ToolError, match="expected one of the tools echo_message"):
        environment.call_tool("shout", {"message": "hi"})


async def test_the_typed_client_and_tools_work_over_wires() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as up:
        assert await asyncio.to_thread(pay_over, up.http_address) == [1.3, 0.2]
        async with await AsyncEnvClient.connect(up.grpc_address) as client:
            session, _ = await client.open()
            assert await session.call_tool("echo_message", {"message": "a"}) == {"result": "a"}


def pay_over(address: str) -> list[float | None]:
    with EchoEnv(base_url=address) as env:
        env.reset()
        messages = ["Hello, World!", "hi"]
        return [env.step(EchoAction(message=message)).reward for message in messages]

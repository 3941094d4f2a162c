"""Tests of OpenEnv's echo environment: classes, rewards and tools."""

from __future__ import annotations

import asyncio
import importlib

import pytest

from echo_env import EchoAction, EchoEnv, EchoState, make_environment
from ludus.env.check import check_environment
from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.errors import ConfigError, EpisodeStateError, ErrorCode, ToolError


def test_environment_passes_every_check() -> None:
    check_environment(make_environment, seeds=range(3), num_steps=5).raise_if_failed()


@pytest.mark.slow
def test_package_is_importable_as_in_openenv_docs() -> None:
    package = importlib.import_module("envs.echo_env")
    assert package.EchoAction(message="hi").message == "hi"
    assert package.EchoEnv.default_url == "http://localhost:8000"


@pytest.mark.parametrize(("message", "reward"), [("Hello, World!", 1.3), ("", 0.0), ("é" * 7, 0.7)])
def test_reward_is_a_tenth_of_the_message_length(message: str, reward: float) -> None:
    environment = make_environment()
    environment.reset(seed=1, episode_id="e")
    for step_count in range(1, 4):
        transition = environment.step(EchoAction(message=message))
        assert transition.reward == reward
        assert not (transition.terminated or transition.truncated)
        assert transition.observation.echoed_message == message
        assert transition.observation.message_length == len(message)
        assert environment.state == EchoState(episode_id="e", step_count=step_count)


def test_message_before_reset_is_refused() -> None:
    with pytest.raises(EpisodeStateError) as error_info:
        make_environment().step(EchoAction(message="hi"))
    assert error_info.value.code == ErrorCode.NOT_RESET


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="loud"):
        make_environment(loud=True)


def test_tool_calls_do_not_count_as_steps() -> None:
    environment = make_environment()
    environment.reset()
    assert environment.call_tool("echo_message", {"message": "hi"}) == {"result": "hi"}
    assert environment.call_tool("echo_with_length", {"message": "hi"}) == {
        "message": "hi",
        "length": 2,
    }
    assert environment.state.step_count == 0


def test_invalid_tool_calls_are_refused() -> None:
    environment = make_environment()
    for arguments in ({}, {"message": 3}, {"message": "hi", "loud": True}):
        with pytest.raises(ToolError, match="expected exactly one string, `message`"):
            environment.call_tool("echo_message", arguments)
    with pytest.raises(ToolError, match="no tool 'shout'"):
        environment.call_tool("shout", {"message": "hi"})


@pytest.mark.slow
async def test_steps_and_tools_work_over_connections() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as server:
        assert await asyncio.to_thread(send_two_messages, server.http_address) == [1.3, 0.2]
        async with await AsyncEnvClient.connect(server.grpc_address) as client:
            session, _ = await client.open()
            assert (await session.call_tool("echo_message", {"message": "a"})).content == {
                "result": "a"
            }


def send_two_messages(address: str) -> list[float | None]:
    """Send two messages over HTTP and return their rewards."""
    with EchoEnv(base_url=address) as env:
        env.reset()
        messages = ["Hello, World!", "hi"]
        return [env.step(EchoAction(message=message)).reward for message in messages]

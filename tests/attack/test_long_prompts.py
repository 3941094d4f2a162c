"""Prompts that agents and environments make too long are refused before they stop a worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import httpx
import pytest

from ludus.env.client import AsyncEnvClient
from ludus.proto.config import RolloutConfig
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.models.chat import ChatTokenizer
from tests.agents.random_policy import make_tiny_chat
from tests.attack.attacked import AttackedProcess, make_cases, serve_agents, serve_env, watch
from tests.rollout.scripted_policy import make_player

pytestmark = pytest.mark.slow

MAX_BODY_CHARS = 15_000_000


def make_user_message(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def make_calls(arguments: str, num_calls: int = 1) -> dict[str, Any]:
    call = {"id": "c", "function": {"name": "look", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call] * num_calls}
    return {"messages": [{"role": "user", "content": "a"}, message]}


def make_tools(**function: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "look", **function}}
    return {**make_user_message("a"), "tools": [tool]}


def make_keys(num_keys: int) -> str:
    return "{" + ",".join(f'"{index}":1' for index in range(num_keys)) + "}"


CHAT_REQUESTS: dict[str, Callable[[], dict[str, Any]]] = {
    "one message": lambda: make_user_message("word " * 3_000_000),
    "million keys in the arguments of a call": lambda: make_calls(make_keys(1_000_000)),
    "million numbers in the arguments of a call": lambda: make_calls("[" + "1," * 7_000_000 + "1]"),
    "arguments of many calls": lambda: make_calls(make_keys(10_000), 110),
    "deep arguments": lambda: make_calls("[" * 900 + "]" * 900, 8_000),
    "open brackets in arguments": lambda: make_calls("[" * MAX_BODY_CHARS),
    "name of a call": lambda: {
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "x" * MAX_BODY_CHARS, "arguments": "{}"}}],
            },
        ]
    },
    "parts": lambda: make_user_message([{"type": "text", "text": "word " * 60}] * 20_000),
    "messages": lambda: {"messages": [{"role": "user", "content": "word " * 140}] * 20_000},
    "description of a tool": lambda: make_tools(description="word " * 3_000_000),
    "schema of a tool": lambda: make_tools(parameters={"enum": ["word " * 40] * 60_000}),
    "special tokens": lambda: make_user_message("<|end|>" * 2_000_000),
    "no spaces": lambda: make_user_message("a" * MAX_BODY_CHARS),
    "three bytes each": lambda: make_user_message("漢" * 5_000_000),
    "as long as may be encoded": lambda: make_user_message("漢" * 512 * 256),
    "system message": lambda: {
        "messages": [
            {"role": "system", "content": "word " * 3_000_000},
            {"role": "user", "content": "a"},
        ]
    },
}
RESPONSES_REQUESTS: dict[str, dict[str, Any]] = {
    "input": {"input": "word " * 3_000_000},
    "instructions": {"input": "a", "instructions": "word " * 3_000_000},
    "output of a call": {
        "input": [{"type": "function_call_output", "call_id": "c", "output": "a" * MAX_BODY_CHARS}]
    },
    "arguments": {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "function_call", "name": "x", "arguments": make_keys(1_000_000)},
        ]
    },
}


@pytest.fixture(scope="module", params=["512", pytest.param("32768", marks=pytest.mark.attack)])
def endpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AttackedProcess]:
    folder = tmp_path_factory.mktemp("agents") / "empty"
    with serve_agents(folder, 2, "--max-tokens", request.param) as attacked:
        yield attacked


async def attack_endpoint(endpoint: AttackedProcess, path: str, body: dict[str, Any]) -> None:
    """Send a request of one episode while another episode's requests are served."""
    content = json.dumps({"model": "m", **body}, ensure_ascii=False).encode()
    is_within_bound = len(content) < 1_000_000
    assert len(content) < 16 << 20

    def get_client(index: int) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {endpoint.addresses[f'api_key_{index}']}"}
        url = endpoint.addresses[f"base_url_{index}"]
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=60)

    async with get_client(0) as attacker, get_client(1) as other:

        async def ask() -> None:
            body = make_user_message("red")
            assert (await other.post("/chat/completions", json=body)).status_code == 200

        async with watch(ask):
            response = await attacker.post(path, content=content)
    assert response.status_code in ((200, 400) if is_within_bound else (400, 413))
    if response.status_code != 200:
        assert len(response.text) < 1000


@pytest.mark.parametrize("make_body", make_cases(CHAT_REQUESTS, 2))
async def test_chat_request_does_not_stop_other_episodes(
    endpoint: AttackedProcess, make_body: Callable[[], dict[str, Any]]
) -> None:
    await attack_endpoint(endpoint, "/chat/completions", make_body())


@pytest.mark.parametrize("body", make_cases(RESPONSES_REQUESTS, 0))
async def test_responses_request_does_not_stop_other_episodes(
    endpoint: AttackedProcess, body: dict[str, Any]
) -> None:
    await attack_endpoint(endpoint, "/responses", body)


# -- environments --------------------------------------------------------------------------------

LONG_MESSAGES = {
    "words": "text = 'word ' * 2_000_000",
    "one word": "text = 'a' * 10_000_000",
    "three bytes each": "text = '漢' * 3_000_000",
    "special tokens": "text = '<|end|>' * 1_500_000",
    "many messages": "messages = [{'role': 'user', 'content': 'word ' * 20}] * 50_000",
    "history of another": (
        "messages = [{'role': 'user', 'content': 'a'}, "
        "{'role': 'assistant', 'content': 'word ' * 2_000_000}, {'role': 'user', 'content': 'b'}]"
    ),
    "as long as may be encoded": "text = '漢' * 32_768 * 200",
    "white space": "text = ' ' * 32_768 * 200",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedProcess]:
    with serve_env(tmp_path_factory.mktemp("environment") / "empty") as attacked:
        yield attacked


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return make_tiny_chat()


@pytest.mark.parametrize("code", make_cases(LONG_MESSAGES))
@pytest.mark.parametrize("max_tokens", [512, pytest.param(32_768, marks=pytest.mark.attack)])
async def test_long_message_of_an_environment_ends_its_episode_only(
    environment: AttackedProcess, chat: ChatTokenizer, code: str, max_tokens: int
) -> None:
    limits = RolloutConfig(max_completion_tokens=8, max_tokens=max_tokens, max_turns=3)
    async with await AsyncEnvClient.connect(environment.grpc) as client:
        hostile, _ = make_player(client, chat, iter([code, "", ""]), limits=limits)
        harmless, _ = make_player(client, chat, repeat("terminated = True"), limits=limits)

        async def play() -> None:
            rollout = await harmless.play_episode(1)
            assert rollout.status is RolloutStatus.TERMINATED, rollout.failure

        async with watch(play):
            rollout = await hostile.play_episode(2)
        assert rollout.status in (RolloutStatus.TRUNCATED, RolloutStatus.FAILED)
        assert len(rollout.failure) < 1000

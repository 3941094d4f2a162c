"""Tests of tool calls by a policy, with a real server over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from ludus.env.client import AsyncEnvClient, AsyncSession, EnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import RolloutConfig
from ludus.proto.errors import ActionParseError, ConfigError, RateLimitError, ToolError
from ludus.trainer.core.types import RolloutStatus, SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tool_calls import HERMES, MAX_CALLS, ToolCall
from ludus.trainer.rollout.adapters.tool_adapter import (
    MAX_INVALID_COMPLETIONS,
    MAX_RESULT_CHARACTERS,
    Toolbox,
)
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode
from ludus.trainer.rollout.transcript import make_transcript
from tests.env.counting_env import CountingEnv
from tests.env.paying_env import PayingEnv
from tests.rollout.calculator_env import CalculatorEnv
from tests.rollout.chat_templates import QWEN3, QWEN25, make_family_tokenizer
from tests.rollout.scripted_policy import make_runner, play_once

pytestmark = pytest.mark.slow

LIMITS = RolloutConfig(max_completion_tokens=400, max_tokens=20_000, max_turns=8)

Policy = Callable[[str], str]
"""A function that maps the text of a prompt to the text of a completion."""


@pytest_asyncio.fixture(params=["grpc", "http"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[AsyncEnvClient]:
    async with EnvServer(CalculatorEnv, ServerOptions(port=0)) as server:
        address = server.grpc_address if request.param == "grpc" else server.http_address
        async with await AsyncEnvClient.connect(address) as env_client:
            yield env_client


@pytest.fixture
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_family_tokenizer(QWEN25))


async def play(
    client: AsyncEnvClient,
    chat: ChatTokenizer,
    policy: Policy,
    limits: RolloutConfig = LIMITS,
    seed: int = 5,
) -> PlayedEpisode:
    """Play one episode with `policy` and the tools of the environment."""

    async def generate(prompt_ids: list[int], sampling: Sampling, seed: int) -> SampledCompletion:
        text = policy(chat.tokenizer.decode(prompt_ids))
        token_ids = chat.encode_completion(text)
        return SampledCompletion(token_ids, [-1.0] * len(token_ids), 0, has_end_token=True)

    toolbox = Toolbox(client, "sums")
    return await play_once(make_runner(client, chat, generate, limits, toolbox=toolbox), seed)


def format_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def use_calculator(text: str) -> str:
    """Return a calculator call, or the calculator's result if the prompt contains it."""
    results = re.findall(r'"sum": (\d+)', text)
    if results:
        return results[-1]
    [(a, b)] = re.findall(r"What is (\d+) \+ (\d+)\?", text)
    return format_call("add", a=int(a), b=int(b))


async def test_policy_with_calculator_gives_the_correct_result(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    for seed in range(5):
        episode = await play(client, chat, use_calculator, seed=seed)
        rollout = episode.rollout
        assert (rollout.status, rollout.reward) == (RolloutStatus.TERMINATED, 1.0)
        assert [turn.reward for turn in rollout.turns] == [0.0, 1.0]
        assert [message["role"] for message in episode.completion] == [
            "assistant",
            "tool",
            "assistant",
        ]
        assert episode.fields is not None
        assert episode.fields["num_calls"] == 1


async def test_tool_descriptions_and_results_are_not_trained_on(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    episode = await play(client, chat, use_calculator)
    [sequence] = episode.rollout.sequences
    pairs = list(zip(sequence.token_ids.tolist(), sequence.loss_mask, strict=True))
    prompt_text = chat.tokenizer.decode([token for token, is_sampled in pairs if not is_sampled])
    sampled_text = chat.tokenizer.decode([token for token, is_sampled in pairs if is_sampled])
    assert "Adds two numbers." in prompt_text
    assert "<tool_response>" in prompt_text
    assert "<tool_call>" in sampled_text
    assert "sum" not in sampled_text


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_tool_that_pays_and_ends_the_episode(chat: ChatTokenizer, wire: str) -> None:
    submit, tip = format_call("submit", word="moon"), format_call("tip")
    async with EnvServer(PayingEnv, ServerOptions(port=0)) as server:
        address = server.grpc_address if wire == "grpc" else server.http_address
        async with await AsyncEnvClient.connect(address) as paying_client:
            script = iter([tip, format_call("look"), tip + submit + tip])
            paid_episode = await play(paying_client, chat, lambda _: next(script))
            script = iter([format_call("submit", word="sun")])
            unpaid_episode = await play(paying_client, chat, lambda _: next(script))
            script = iter([tip + format_call("give_up")])
            cut_episode = await play(paying_client, chat, lambda _: next(script))
    rollout = paid_episode.rollout
    assert (rollout.status, rollout.success) == (RolloutStatus.TERMINATED, True)
    assert [turn.reward for turn in rollout.turns] == [0.5, 0.0, 1.5]
    assert (rollout.reward, rollout.num_tool_calls) == (2.0, 4), "no call after the end"
    rollout = unpaid_episode.rollout
    assert (rollout.status, rollout.success) == (RolloutStatus.TERMINATED, False)
    rollout = cut_episode.rollout
    assert (rollout.status, rollout.reward) == (RolloutStatus.TRUNCATED, 0.5)
    assert rollout.limit == "", "the environment truncated the episode, not the run"
    assert read_unanswered_texts(paid_episode) == ['{"paid": true}', '{"right": true}']
    assert read_unanswered_texts(unpaid_episode) == ['{"right": false}']
    assert read_unanswered_texts(cut_episode) == ['{"paid": true}', "{}"]


def read_unanswered_texts(episode: PlayedEpisode) -> list[str]:
    """Return the texts after the last completion in the transcript of an episode."""
    record = make_transcript(0, 0, episode.rollout, episode.history, episode.unanswered)
    assert {message.role for message in record.unanswered} == {"tool"}
    return [message.text for message in record.unanswered]


async def test_multiple_calls_in_one_completion_run_in_order(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    script = iter([format_call("add", a=1, b=2) + format_call("add", a=3, b=4), "0"])
    episode = await play(client, chat, lambda _: next(script))
    results = [message["content"] for message in episode.completion if message["role"] == "tool"]
    assert results == ['{"sum": 3}', '{"sum": 7}']


@pytest.mark.parametrize(
    ("completions", "expected_counts"),
    [
        (["0"], (0, 0)),
        ([format_call("add", a=1, b=2), "0"], (1, 0)),
        ([format_call("add", a=1, b=2) + format_call("add", a="one"), "0"], (2, 1)),
        (
            [
                "<tool_call>{not json}</tool_call>",
                format_call("subtract"),
                format_call("add", a=1, b=2),
            ],
            (3, 2),
        ),
        (
            ["<tool_call>oops"] * MAX_INVALID_COMPLETIONS,
            (MAX_INVALID_COMPLETIONS, MAX_INVALID_COMPLETIONS),
        ),
    ],
)
async def test_calls_and_failed_calls_are_counted(
    client: AsyncEnvClient,
    chat: ChatTokenizer,
    completions: list[str],
    expected_counts: tuple[int, int],
) -> None:
    script = iter(completions)
    rollout = (await play(client, chat, lambda _: next(script, "0"))).rollout
    assert (rollout.num_tool_calls, rollout.num_tool_calls_failed) == expected_counts


@pytest.mark.parametrize(
    ("completion", "expected_error"),
    [
        ("<tool_call>{not json}</tool_call>", "expected JSON between <tool_call>"),
        ('<tool_call>{"arguments": {}}</tool_call>', "expected a tool call like"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "to be an object, got '3'"),
        (
            format_call("subtract", a=1, b=2),
            "expected one of the tools add, recite, got 'subtract'",
        ),
        (format_call("add", a=1) * (MAX_CALLS + 1), f"at most {MAX_CALLS} tool calls"),
        ('<tool_call>{"name": "\\ud800"}', "surrogates not allowed"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}', "surrogates not allowed"),
        (format_call("add", a=10**20, b=1), "a tool call that can be sent, got"),
    ],
)
async def test_invalid_call_returns_an_error_and_the_policy_can_retry(
    client: AsyncEnvClient, chat: ChatTokenizer, completion: str, expected_error: str
) -> None:
    script = iter([completion])
    episode = await play(client, chat, lambda text: next(script, "") or use_calculator(text))
    assert expected_error in json.loads(episode.completion[1]["content"])["error"]
    assert (episode.rollout.status, episode.rollout.reward) == (RolloutStatus.TERMINATED, 1.0)


async def test_repeated_invalid_calls_end_the_episode_as_invalid(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    limits = LIMITS.model_copy(update={"invalid_action_reward": -0.5})
    episode = await play(client, chat, lambda _: "<tool_call>oops", limits)
    assert episode.rollout.status is RolloutStatus.INVALID_ACTION
    assert episode.rollout.reward == -0.5
    assert len(episode.rollout.turns) == MAX_INVALID_COMPLETIONS


async def test_failed_tool_returns_an_error_without_ending_the_episode(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    script = iter([format_call("add", a="one"), "0"])
    episode = await play(client, chat, lambda _: next(script))
    assert "expected two integers" in json.loads(episode.completion[1]["content"])["error"]
    assert (episode.rollout.status, episode.rollout.reward) == (RolloutStatus.TERMINATED, 0.0)


async def test_error_outside_a_tool_voids_the_episode(
    client: AsyncEnvClient, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raise_rate_limit(*_: object) -> None:
        raise RateLimitError("60 calls per minute exceeded")

    monkeypatch.setattr(AsyncSession, "call_tool", raise_rate_limit)
    script = iter([format_call("subtract"), format_call("add", a=1, b=2)])
    episode = await play(client, chat, lambda _: next(script))
    assert episode.rollout.status is RolloutStatus.FAILED
    assert "60 calls per minute" in episode.rollout.failure
    assert len(episode.rollout.turns) == 2
    assert episode.rollout.num_tool_calls_failed == 1, "the earlier failed call is not counted"


async def test_long_result_is_truncated_after_the_documented_number_of_characters(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    script = iter([format_call("recite"), "0"])
    episode = await play(client, chat, lambda _: next(script))
    result_text = episode.completion[1]["content"]
    assert len(result_text) < MAX_RESULT_CHARACTERS + 50
    assert "more characters" in result_text
    assert result_text.count("七") > MAX_RESULT_CHARACTERS - 50


async def test_endless_calls_stop_at_the_turn_limit(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    episode = await play(client, chat, lambda _: format_call("add", a=1, b=1))
    assert episode.rollout.status is RolloutStatus.TRUNCATED
    assert len(episode.rollout.turns) == 8
    last_sequence = episode.rollout.sequences[-1]
    final_text = chat.decode(last_sequence.token_ids[last_sequence.turns[-1].end :])
    assert '{"sum": 2}' in final_text, "the last tool result is missing"


async def test_completion_without_call_or_action_ends_the_episode(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    episode = await play(client, chat, lambda _: "I do not know")
    assert episode.rollout.status is RolloutStatus.INVALID_ACTION


async def test_tool_calls_in_reasoning_are_ignored(client: AsyncEnvClient) -> None:
    chat = ChatTokenizer(make_family_tokenizer(QWEN3), enable_thinking=True)
    completion = f"<think>\nmaybe {format_call('add', a=1, b=2)}\n</think>\n\n0"
    episode = await play(client, chat, lambda _: completion)
    assert episode.rollout.status is RolloutStatus.TERMINATED
    assert len(episode.rollout.turns) == 1


async def test_environment_without_tools_is_rejected(chat: ChatTokenizer) -> None:
    async with (
        EnvServer(CountingEnv, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        with pytest.raises(ConfigError, match="environment 'sums': tools = true"):
            await play(client, chat, lambda _: "ADD 1")
        assert server.core.load.num_sessions == 0


async def test_client_returns_tool_results_and_raises_tool_errors(client: AsyncEnvClient) -> None:
    session, _ = await client.open(seed=5)
    assert (await session.call_tool("add", {"a": 2, "b": 3})).content == {"sum": 5}
    with pytest.raises(ToolError, match="expected two integers"):
        await session.call_tool("add")
    with pytest.raises(ToolError):
        await session.call_tool("subtract", {"a": 2, "b": 3})
    assert session.step_index == 0
    assert (await session.step({"value": 3})).terminated


async def test_synchronous_client_calls_tools() -> None:
    async with EnvServer(CalculatorEnv, ServerOptions(port=0)) as server:

        def call_add() -> dict[str, Any]:
            with EnvClient.connect(server.grpc_address) as client:
                session, _ = client.open(seed=5)
                return session.call_tool("add", {"a": 2, "b": 3}).content

        assert await asyncio.to_thread(call_add) == {"sum": 5}


@pytest.mark.parametrize(
    ("completion", "expected_calls"),
    [
        ("HIT", []),
        ('{"name": "add", "parameters": {"a": 1}}', [ToolCall("add", {"a": 1})]),
        ('[{"name": "add", "arguments": {}}]', [ToolCall("add", {})]),
        ('{"add": 3}', []),
        ('{"name": "Bob", "age": 3}', []),
        ("[]", []),
        ('I ask.\n<tool_call>{"name": "add"}</tool_call> done', [ToolCall("add", {})]),
        ('<tool_call>{"name": "add"}', [ToolCall("add", {})]),
    ],
)
def test_calls_are_parsed_in_all_common_formats(
    completion: str, expected_calls: list[ToolCall]
) -> None:
    assert HERMES.read_calls(completion) == expected_calls


def test_too_deeply_nested_json_is_rejected_or_ignored() -> None:
    with pytest.raises(ActionParseError, match="expected JSON between <tool_call>"):
        HERMES.read_calls("<tool_call>" + "[" * 100_000)
    assert HERMES.read_calls("[" * 100_000) == []


def test_error_message_for_a_malformed_call_has_limited_length() -> None:
    with pytest.raises(ActionParseError) as error_info:
        HERMES.read_calls("<tool_call>" + "x" * 100_000)
    assert len(error_info.value.message) < 500

"""Tests of the agent endpoint with OpenAI and MCP clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import httpx2
import openai
import pytest
import pytest_asyncio
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from openai import AsyncOpenAI

from ludus.env.types import Tool
from ludus.proto.config import RolloutConfig
from ludus.trainer.core.types import Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tool_calls import ToolCall
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.endpoint.server import AgentEndpoint, EndpointEpisode
from tests.agents.random_policy import TOOL, make_tiny_chat
from tests.rollout.scripted_policy import ScriptedPolicy

CALL = '<tool_call>{"name": "look", "arguments": {"box": "red"}}</tool_call>'
FUNCTION_TOOL = {"type": "function", **TOOL["function"]}
PROMPT: list[Any] = [{"role": "user", "content": "Where is the key?"}]
LIMITS = RolloutConfig(max_completion_tokens=200, max_tokens=4000, max_turns=8)


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return make_tiny_chat()


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[AgentEndpoint]:
    agent_endpoint = AgentEndpoint()
    await agent_endpoint.start()
    yield agent_endpoint
    await agent_endpoint.stop()


class ScriptedEpisode:
    """An episode with a scripted policy and an OpenAI client."""

    def __init__(self, chat: ChatTokenizer, completions: tuple[str, ...]) -> None:
        self.policy = ScriptedPolicy(chat, iter(completions))
        self.tree = ConversationTree(self.policy, chat, LIMITS, Sampling(1.0, 1), key=0)
        self.endpoint_episode: EndpointEpisode

    @property
    def client(self) -> AsyncOpenAI:
        access = self.endpoint_episode.access
        return AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)


@contextmanager
def open_episode(
    endpoint: AgentEndpoint, chat: ChatTokenizer, *completions: str, tools: Any = None
) -> Iterator[ScriptedEpisode]:
    episode = ScriptedEpisode(chat, completions)
    with endpoint.open_episode(episode.tree, tools) as episode.endpoint_episode:
        yield episode


async def test_chat_tool_loop_is_one_sequence(endpoint: AgentEndpoint, chat: ChatTokenizer) -> None:
    with open_episode(endpoint, chat, f"Let me look.{CALL}", "red") as episode:
        messages = list(PROMPT)
        completion = await episode.client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=[TOOL], temperature=0.2, user="somebody"
        )
        choice = completion.choices[0]
        assert (completion.model, choice.finish_reason) == ("gpt-4o", "tool_calls")
        assert choice.message.content == "Let me look."
        [call] = choice.message.tool_calls or []
        assert json.loads(call.function.arguments) == {"box": "red"}
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "key"})
        response = await episode.client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=[TOOL]
        )
    assert response.choices[0].message.content == "red"
    assert response.choices[0].finish_reason == "stop"
    [sequence] = episode.tree.make_sequences()
    assert list(map(len, episode.policy.prompts)) == [turn.start for turn in sequence.turns]
    assert response.usage and response.usage.prompt_tokens == len(episode.policy.prompts[1])


async def test_streamed_chunks_contain_text_calls_and_usage(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    text = "the key is in the red box, and nowhere else"
    with open_episode(endpoint, chat, f"{text}{CALL}") as episode:
        stream = await episode.client.chat.completions.create(
            model="m",
            messages=PROMPT,
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == text
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert calls[0].id and calls[0].function and calls[0].function.name == "look"
    arguments = "".join((call.function and call.function.arguments) or "" for call in calls)
    assert json.loads(arguments) == {"box": "red"}
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].choices == [] and chunks[-1].usage


async def test_responses_tool_loop_is_one_sequence_with_and_without_streaming(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, CALL, "red", "blue") as episode:
        responses = episode.client.responses
        first_response = await responses.create(
            model="m", instructions="Be brief.", input="Where?", tools=[FUNCTION_TOOL]
        )
        [call] = first_response.output
        assert call.type == "function_call"
        history: list[Any] = [{"role": "user", "content": "Where?"}]
        history += [output.model_dump(exclude_none=True) for output in first_response.output]
        history += [{"type": "function_call_output", "call_id": call.call_id, "output": "key"}]
        async with responses.stream(
            model="m", instructions="Be brief.", input=history, tools=[FUNCTION_TOOL]
        ) as stream:
            event_types = [event.type async for event in stream]
            second_response = await stream.get_final_response()
        assert second_response.output_text == "red"
        assert event_types[0] == "response.created" and event_types[-1] == "response.completed"
        assert "response.output_text.delta" in event_types
        third_response = await responses.create(
            model="m",
            instructions="Be brief.",
            previous_response_id=second_response.id,
            input="And now?",
            tools=[FUNCTION_TOOL],
        )
        assert third_response.output_text == "blue"
    [sequence] = episode.tree.make_sequences()
    assert len(sequence.turns) == 3


async def test_request_sets_number_and_length_of_completions_and_logprobs(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, "red", "blue...", "green") as episode:
        completion = await episode.client.chat.completions.create(
            model="m", messages=PROMPT, n=2, logprobs=True, max_completion_tokens=9, seed=4
        )
        assert [choice.finish_reason for choice in completion.choices] == ["stop", "length"]
        token_logprobs = completion.choices[0].logprobs and completion.choices[0].logprobs.content
        assert token_logprobs and "".join(token.token for token in token_logprobs) == "red"
        assert all(token.logprob == -1.0 for token in token_logprobs)
        assert len(episode.tree.make_sequences()) == 2


async def test_text_after_a_stop_string_is_not_returned_or_trained_on(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, "red\nObservation: made up", "blue") as episode:
        completion = await episode.client.chat.completions.create(
            model="m", messages=PROMPT, stop=["\nObservation:", "END"]
        )
        message = completion.choices[0].message
        assert (message.content, completion.choices[0].finish_reason) == ("red", "stop")
        await episode.client.chat.completions.create(
            model="m",
            messages=[
                *PROMPT,
                {"role": "assistant", "content": "red"},
                {"role": "user", "content": "?"},
            ],
        )
    [sequence] = episode.tree.make_sequences()
    first_turn = sequence.turns[0]
    trained_text = chat.decode(sequence.token_ids[first_turn.start : first_turn.end].tolist())
    assert trained_text.startswith("red\nObservation") and "made" not in trained_text
    assert sequence.token_ids[first_turn.end] == chat.end_token_id


async def test_only_one_call_is_returned_without_parallel_tool_calls(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, CALL + CALL, CALL + CALL) as episode:
        create = episode.client.chat.completions.create
        arguments: dict[str, Any] = {"model": "m", "messages": PROMPT, "tools": [TOOL]}
        short_completion = await create(**arguments, parallel_tool_calls=False)
        long_completion = await create(**arguments)
    assert len(short_completion.choices[0].message.tool_calls or []) == 1
    assert len(long_completion.choices[0].message.tool_calls or []) == 2
    short_sequence, long_sequence = episode.tree.make_sequences()
    assert short_sequence.turns[0].end < long_sequence.turns[0].end


async def test_text_without_valid_or_allowed_calls_is_returned_as_content(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    invalid_call = "<tool_call>{name: look}</tool_call>"
    with open_episode(endpoint, chat, invalid_call, CALL, "<think>hm</think>red") as episode:
        create = episode.client.chat.completions.create
        assert (await create(model="m", messages=PROMPT, tools=[TOOL])).choices[
            0
        ].message.content == invalid_call
        # A request that allows no tool calls receives the text of a call as content.
        for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            episode.policy.script = iter([CALL])
            completion = await create(model="m", messages=PROMPT, **fields)
            assert completion.choices[0].message.content == CALL
        episode.policy.script = iter(["<think>hm</think>red"])
        message = (await create(model="m", messages=PROMPT)).choices[0].message
        assert message.content == "red"
        assert message.model_extra == {"reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"unheard_of": 1}, "unheard_of"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages.0.content.0",
        ),
        ({"messages": [{"role": [], "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
        ({"tools": 5}, "tools"),
        ({"stream_options": 5}, "stream_options"),
        ({"stream_options": {"include_all": True}}, "stream_options.include_all"),
        ({"stream_options": {"include_usage": "maybe"}}, "include_usage"),
    ],
)
async def test_unsupported_chat_parameter_is_rejected_by_name(
    endpoint: AgentEndpoint, chat: ChatTokenizer, fields: dict[str, Any], param: str
) -> None:
    with open_episode(endpoint, chat) as episode, pytest.raises(openai.BadRequestError) as error:
        await episode.client.chat.completions.create(
            **{"model": "m", "messages": PROMPT, "extra_body": fields}
        )
    assert (error.value.param, error.value.type) == (param, "invalid_request_error")
    assert param in error.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"previous_response_id": []}, "previous_response_id"),
        ({"include": ["web"]}, "include"),
        ({"include": 5}, "include"),
        ({"tools": 5}, "tools"),
        ({"input": [{"role": [], "content": "a"}]}, "input.0.role"),
    ],
)
async def test_unsupported_responses_parameter_is_rejected_by_name(
    endpoint: AgentEndpoint, chat: ChatTokenizer, fields: dict[str, Any], param: str
) -> None:
    with open_episode(endpoint, chat) as episode, pytest.raises(openai.APIStatusError) as error:
        await episode.client.responses.create(model="m", input="a", extra_body=fields)
    assert error.value.body["param"] == param  # type: ignore[index, call-overload]


async def test_deeply_nested_call_in_the_history_does_not_fail_the_episode(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    deep_call = {"name": "look", "arguments": "[" * 100_000}
    call_message = {"role": "assistant", "tool_calls": [{"id": "c", "function": deep_call}]}
    with open_episode(endpoint, chat) as episode, pytest.raises(openai.APIStatusError) as error:
        await episode.client.chat.completions.create(model="m", messages=[*PROMPT, call_message])
    assert error.value.code == "context_length_exceeded"
    episode.endpoint_episode.raise_if_failed()


async def test_parameters_without_effect_are_accepted(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, "red", "red") as episode:
        await episode.client.chat.completions.create(
            model="m",
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": "a", "name": "somebody"},
                {"role": "assistant", "content": None, "refusal": None},
            ],
            metadata={},
            store=False,
            reasoning_effort="low",
            response_format={"type": "text"},
            frequency_penalty=0.5,
            stream=False,
            tool_choice="auto",
            extra_body={"top_k": 5, "repetition_penalty": 1.1, "logit_bias": None},
        )
        await episode.client.responses.create(
            model="m",
            input="a",
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": {"type": "text"}, "verbosity": "low"},
            store=True,
            truncation="disabled",
            temperature=1.0,
        )


async def test_key_is_valid_for_one_episode_while_the_episode_is_open(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with (
        open_episode(endpoint, chat, "red") as episode,
        open_episode(endpoint, chat, "blue") as other_episode,
    ):
        texts = [
            (await case.client.chat.completions.create(model="m", messages=PROMPT))
            .choices[0]
            .message.content
            for case in (other_episode, episode)
        ]
        assert texts == ["blue", "red"]
        client = episode.client
        assert [model.id async for model in client.models.list()] == ["ludus"]
        wrong_client = AsyncOpenAI(
            base_url=episode.endpoint_episode.access.base_url, api_key="sk-guess", max_retries=0
        )
        with pytest.raises(openai.AuthenticationError):
            await wrong_client.models.list()
    with pytest.raises(openai.AuthenticationError):
        await client.chat.completions.create(model="m", messages=PROMPT)


async def test_pending_request_is_cancelled_when_the_episode_ends(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    async def wait_forever(*_: Any) -> Any:
        await asyncio.Event().wait()

    with open_episode(endpoint, chat) as episode:
        episode.policy.replacement = wait_forever
        request_task = asyncio.ensure_future(
            episode.client.chat.completions.create(model="m", messages=PROMPT)
        )
        while not episode.endpoint_episode.handler_tasks:
            await asyncio.sleep(0.01)
    with pytest.raises(openai.AuthenticationError, match="episode"):
        await request_task
    assert episode.tree.num_turns == 0


async def test_disconnected_client_leaves_no_turn(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    cancelled_event = asyncio.Event()

    async def wait_until_cancelled(*_: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled_event.set()
            raise

    with open_episode(endpoint, chat) as episode:
        episode.policy.replacement = wait_until_cancelled
        with pytest.raises(openai.APITimeoutError):
            await episode.client.chat.completions.create(model="m", messages=PROMPT, timeout=0.3)
        await asyncio.wait_for(cancelled_event.wait(), 10)
    assert episode.tree.num_turns == 0


async def test_failed_policy_fails_the_episode_even_if_the_agent_continues(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    async def raise_error(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with open_episode(endpoint, chat) as episode:
        episode.policy.replacement = raise_error
        with pytest.raises(openai.UnprocessableEntityError, match="out of memory"):
            await episode.client.chat.completions.create(model="m", messages=PROMPT)
        with pytest.raises(RuntimeError, match="out of memory"):
            episode.endpoint_episode.raise_if_failed()


class BoxTools:
    """A simulated session with tools."""

    tools = (Tool("look", "Looks.", {"type": "object", "properties": {}}),)

    async def call_tool(self, call: ToolCall) -> tuple[str, bool]:
        return f"called with {call.arguments}", False


async def test_mcp_calls_tools_with_the_episode_key(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with (
        open_episode(endpoint, chat, tools=BoxTools()) as episode,
        open_episode(endpoint, chat) as plain_episode,
    ):
        access = episode.endpoint_episode.access
        assert plain_episode.endpoint_episode.access.mcp_url is None
        headers = {"authorization": f"Bearer {access.api_key}"}
        async with httpx.AsyncClient(headers=headers) as http:

            async def send_request(method: str, **params: Any) -> Any:
                payload = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
                return (await http.post(str(access.mcp_url), json=payload)).json()

            initialization = await send_request("initialize", protocolVersion="2025-06-18")
            assert initialization["result"]["protocolVersion"] == "2025-06-18"
            notification = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            assert (await http.post(str(access.mcp_url), json=notification)).status_code == 202
            assert (await send_request("tools/list"))["result"]["tools"][0]["name"] == "look"
            call_result = await send_request("tools/call", name="look", arguments={"a": 1})
            assert call_result["result"]["content"][0]["text"] == "called with {'a': 1}"
            assert "error" in await send_request("tools/call", name="nothing")
            assert "error" in await send_request("resources/list")
            invalid_request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": [1]}
            error_response = (await http.post(str(access.mcp_url), json=invalid_request)).json()
            assert error_response["error"]["message"] == "expected params by name, got [1]"
        other_headers = {"authorization": f"Bearer {plain_episode.endpoint_episode.access.api_key}"}
        async with httpx.AsyncClient(headers=other_headers) as http:
            payload = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            assert (await http.post(str(access.mcp_url), json=payload)).status_code == 404


async def test_official_mcp_client_lists_and_calls_tools(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, tools=BoxTools()) as episode:
        access = episode.endpoint_episode.access
        headers = {"authorization": f"Bearer {access.api_key}"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            streamable_http_client(str(access.mcp_url), http_client=http) as streams,
            ClientSession(*streams[:2]) as session,
        ):
            await session.initialize()
            assert [tool.name for tool in (await session.list_tools()).tools] == ["look"]
            call_result = await session.call_tool("look", {"a": 1})
            assert call_result.content[0].text == "called with {'a': 1}"  # type: ignore[union-attr]


@pytest.mark.parametrize("is_stream", [False, True], ids=["complete", "streamed"])
async def test_call_ids_are_equal_for_equal_histories_and_differ_otherwise(
    endpoint: AgentEndpoint, chat: ChatTokenizer, is_stream: bool
) -> None:
    ids = []
    for prompt in ("Where is the key?", "Where is the key?", "Where is the hat?"):
        with open_episode(endpoint, chat, CALL + CALL) as episode:
            arguments: dict[str, Any] = {
                "model": "any",
                "messages": [{"role": "user", "content": prompt}],
                "tools": [TOOL],
            }
            if is_stream:
                stream = await episode.client.chat.completions.create(**arguments, stream=True)
                deltas = [chunk.choices[0].delta async for chunk in stream]
                calls = [call for delta in deltas for call in delta.tool_calls or [] if call.id]
            else:
                completion = await episode.client.chat.completions.create(**arguments)
                calls = completion.choices[0].message.tool_calls or []
            ids.append([call.id for call in calls])
    assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 4


async def test_chat_and_responses_use_the_same_call_id(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, CALL, CALL) as episode:
        completion = await episode.client.chat.completions.create(
            model="any", messages=PROMPT, tools=[TOOL]
        )
        response = await episode.client.responses.create(
            model="any",
            input=PROMPT,
            tools=[FUNCTION_TOOL],  # type: ignore[list-item]
        )
    [call] = completion.choices[0].message.tool_calls or []
    [output] = response.output
    assert output.type == "function_call" and output.call_id == call.id

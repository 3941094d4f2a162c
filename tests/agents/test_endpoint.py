"""The endpoint with OpenAI's client: chat and responses, complete and streamed; refusals."""

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
from ludus.trainer.rollout.adapters.tool_adapter import ToolCall
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.endpoint.server import AgentEndpoint, EndpointEpisode
from tests.agents.random_policy import TOOL, tiny_chat
from tests.rollout.scripted_policy import ScriptedPolicy

CALL = '<tool_call>{"name": "look", "arguments": {"box": "red"}}</tool_call>'
FUNCTION = {"type": "function", **TOOL["function"]}
HELLO: list[Any] = [{"role": "user", "content": "Where is the key?"}]
LIMITS = RolloutConfig(max_completion_tokens=200, max_tokens=4000, max_turns=8)


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return tiny_chat()


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[AgentEndpoint]:
    up = AgentEndpoint()
    await up.start()
    yield up
    await up.stop()


class ScriptedEpisode:
    """An episode whose policy has a script, and a client for it."""

    def __init__(self, chat: ChatTokenizer, answers: tuple[str, ...]) -> None:
        self.policy = ScriptedPolicy(chat, iter(answers))
        self.tree = ConversationTree(self.policy, chat, LIMITS, Sampling(1.0, 1), key=0)
        self.episode: EndpointEpisode

    @property
    def client(self) -> AsyncOpenAI:
        access = self.episode.access
        return AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)


@contextmanager
def open_episode(
    endpoint: AgentEndpoint, chat: ChatTokenizer, *answers: str, tools: Any = None
) -> Iterator[ScriptedEpisode]:
    scripted = ScriptedEpisode(chat, answers)
    with endpoint.open_episode(scripted.tree, tools) as scripted.episode:
        yield scripted


async def test_a_tool_loop_over_chat_is_one_sequence(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, f"Let me look.{CALL}", "red") as scripted:
        messages = list(HELLO)
        completion = await scripted.client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=[TOOL], temperature=0.2, user="somebody"
        )
        choice = completion.choices[0]
        assert (completion.model, choice.finish_reason) == ("gpt-4o", "tool_calls")
        assert choice.message.content == "Let me look."
        [call] = choice.message.tool_calls or []
        assert json.loads(call.function.arguments) == {"box": "red"}
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "key"})
        last = await scripted.client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=[TOOL]
        )
    assert last.choices[0].message.content == "red"
    assert last.choices[0].finish_reason == "stop"
    [sequence] = scripted.tree.make_sequences()
    assert [len(prompt) for prompt in scripted.policy.prompts] == [t.start for t in sequence.turns]
    assert last.usage and last.usage.prompt_tokens == len(scripted.policy.prompts[1])


async def test_a_stream_says_the_same_in_pieces(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    text = "the key is in the red box, and nowhere else"
    with open_episode(endpoint, chat, f"{text}{CALL}") as scripted:
        stream = await scripted.client.chat.completions.create(
            model="m",
            messages=HELLO,
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


async def test_a_tool_loop_over_responses_is_one_sequence_streamed_or_not(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, CALL, "red", "blue") as scripted:
        responses = scripted.client.responses
        first = await responses.create(
            model="m", instructions="Be brief.", input="Where?", tools=[FUNCTION]
        )
        [call] = first.output
        assert call.type == "function_call"
        history: list[Any] = [{"role": "user", "content": "Where?"}]
        history += [item.model_dump(exclude_none=True) for item in first.output]
        history += [{"type": "function_call_output", "call_id": call.call_id, "output": "key"}]
        async with responses.stream(
            model="m", instructions="Be brief.", input=history, tools=[FUNCTION]
        ) as stream:
            kinds = [event.type async for event in stream]
            second = await stream.get_final_response()
        assert second.output_text == "red"
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert "response.output_text.delta" in kinds
        third = await responses.create(
            model="m",
            instructions="Be brief.",
            previous_response_id=second.id,
            input="And now?",
            tools=[FUNCTION],
        )
        assert third.output_text == "blue"
    [sequence] = scripted.tree.make_sequences()
    assert len(sequence.turns) == 3


async def test_number_log_probs_and_limit_of_completions_follow_the_request(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, "red", "blue...", "green") as scripted:
        both = await scripted.client.chat.completions.create(
            model="m", messages=HELLO, n=2, logprobs=True, max_completion_tokens=9, seed=4
        )
        assert [choice.finish_reason for choice in both.choices] == ["stop", "length"]
        content = both.choices[0].logprobs and both.choices[0].logprobs.content
        assert content and "".join(token.token for token in content) == "red"
        assert all(token.logprob == -1.0 for token in content)
        assert len(scripted.tree.make_sequences()) == 2


async def test_text_after_a_stop_text_is_neither_returned_nor_trained_on(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, "red\nObservation: made up", "blue") as scripted:
        answer = await scripted.client.chat.completions.create(
            model="m", messages=HELLO, stop=["\nObservation:", "END"]
        )
        message = answer.choices[0].message
        assert (message.content, answer.choices[0].finish_reason) == ("red", "stop")
        await scripted.client.chat.completions.create(
            model="m",
            messages=[
                *HELLO,
                {"role": "assistant", "content": "red"},
                {"role": "user", "content": "?"},
            ],
        )
    [sequence] = scripted.tree.make_sequences()
    first = sequence.turns[0]
    trained = chat.decode(sequence.token_ids[first.start : first.end].tolist())
    assert trained.startswith("red\nObservation") and "made" not in trained
    assert sequence.token_ids[first.end] == chat.end_token_id


async def test_only_one_call_is_returned_without_parallel_tool_calls(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, CALL + CALL, CALL + CALL) as scripted:
        create = scripted.client.chat.completions.create
        alone = await create(model="m", messages=HELLO, tools=[TOOL], parallel_tool_calls=False)
        two = await create(model="m", messages=HELLO, tools=[TOOL])
    assert len(alone.choices[0].message.tool_calls or []) == 1
    assert len(two.choices[0].message.tool_calls or []) == 2
    short, long = scripted.tree.make_sequences()
    assert short.turns[0].end < long.turns[0].end


async def test_text_without_a_call_is_returned_unchanged(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    broken = "<tool_call>{name: look}</tool_call>"
    with open_episode(endpoint, chat, broken, CALL, "<think>hm</think>red") as scripted:
        create = scripted.client.chat.completions.create
        assert (await create(model="m", messages=HELLO, tools=[TOOL])).choices[
            0
        ].message.content == broken
        # A request that allows no tool calls gets the text of a call as plain content.
        for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            scripted.policy.script = iter([CALL])
            answer = await create(model="m", messages=HELLO, **fields)
            assert answer.choices[0].message.content == CALL
        scripted.policy.script = iter(["<think>hm</think>red"])
        message = (await create(model="m", messages=HELLO)).choices[0].message
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
async def test_what_is_not_honoured_is_refused_by_name(
    endpoint: AgentEndpoint, chat: ChatTokenizer, fields: dict[str, Any], param: str
) -> None:
    with open_episode(endpoint, chat) as scripted, pytest.raises(openai.BadRequestError) as refused:
        await scripted.client.chat.completions.create(
            **{"model": "m", "messages": HELLO, "extra_body": fields}
        )
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert param in refused.value.message


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
async def test_responses_refuse_by_name_as_well(
    endpoint: AgentEndpoint, chat: ChatTokenizer, fields: dict[str, Any], param: str
) -> None:
    with open_episode(endpoint, chat) as scripted, pytest.raises(openai.APIStatusError) as refused:
        await scripted.client.responses.create(model="m", input="a", extra_body=fields)
    assert refused.value.body["param"] == param  # type: ignore[index, call-overload]


async def test_a_call_in_the_history_may_be_nested_deeper_than_python_reads(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    deep = {"name": "look", "arguments": "[" * 100_000}
    called = {"role": "assistant", "tool_calls": [{"id": "c", "function": deep}]}
    with open_episode(endpoint, chat) as scripted, pytest.raises(openai.APIStatusError) as refused:
        await scripted.client.chat.completions.create(model="m", messages=[*HELLO, called])
    assert refused.value.code == "context_length_exceeded", "and not the policy's failure"
    scripted.episode.raise_if_failed()


async def test_what_changes_nothing_is_taken(endpoint: AgentEndpoint, chat: ChatTokenizer) -> None:
    with open_episode(endpoint, chat, "red", "red") as scripted:
        await scripted.client.chat.completions.create(
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
        await scripted.client.responses.create(
            model="m",
            input="a",
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": {"type": "text"}, "verbosity": "low"},
            store=True,
            truncation="disabled",
            temperature=1.0,
        )


async def test_a_key_opens_its_own_episode_until_that_is_over(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with (
        open_episode(endpoint, chat, "red") as scripted,
        open_episode(endpoint, chat, "blue") as other,
    ):
        texts = [
            (await each.client.chat.completions.create(model="m", messages=HELLO))
            .choices[0]
            .message.content
            for each in (other, scripted)
        ]
        assert texts == ["blue", "red"]
        client = scripted.client
        assert [model.id async for model in client.models.list()] == ["ludus"]
        wrong = AsyncOpenAI(
            base_url=scripted.episode.access.base_url, api_key="sk-guess", max_retries=0
        )
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()
    with pytest.raises(openai.AuthenticationError):
        await client.chat.completions.create(model="m", messages=HELLO)


async def test_what_is_asked_at_the_end_of_an_episode_is_given_up_with_it(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    with open_episode(endpoint, chat) as scripted:
        scripted.policy.replacement = never
        asking = asyncio.ensure_future(
            scripted.client.chat.completions.create(model="m", messages=HELLO)
        )
        while not scripted.episode.handler_tasks:
            await asyncio.sleep(0.01)
    with pytest.raises(openai.AuthenticationError, match="episode"):
        await asking
    assert scripted.tree.num_turns == 0


async def test_a_client_that_has_gone_away_leaves_no_turn(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    given_up = asyncio.Event()

    async def slow(*_: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            given_up.set()
            raise

    with open_episode(endpoint, chat) as scripted:
        scripted.policy.replacement = slow
        with pytest.raises(openai.APITimeoutError):
            await scripted.client.chat.completions.create(model="m", messages=HELLO, timeout=0.3)
        await asyncio.wait_for(given_up.wait(), 10)
    assert scripted.tree.num_turns == 0


async def test_a_failed_policy_fails_the_episode_even_if_the_agent_continues(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    async def raise_error(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with open_episode(endpoint, chat) as scripted:
        scripted.policy.replacement = raise_error
        with pytest.raises(openai.UnprocessableEntityError, match="out of memory"):
            await scripted.client.chat.completions.create(model="m", messages=HELLO)
        with pytest.raises(RuntimeError, match="out of memory"):
            scripted.episode.raise_if_failed()


class Box:
    """A simulated session with tools."""

    tools = (Tool("look", "Looks.", {"type": "object", "properties": {}}),)

    async def call_tool(self, call: ToolCall) -> tuple[str, bool]:
        return f"called with {call.arguments}", False


async def test_tools_are_called_over_mcp_with_the_key_of_the_episode(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with (
        open_episode(endpoint, chat, tools=Box()) as scripted,
        open_episode(endpoint, chat) as without_tools,
    ):
        access = scripted.episode.access
        assert without_tools.episode.access.mcp_url is None
        headers = {"authorization": f"Bearer {access.api_key}"}
        async with httpx.AsyncClient(headers=headers) as http:

            async def ask(method: str, **params: Any) -> Any:
                payload = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
                return (await http.post(str(access.mcp_url), json=payload)).json()

            began = await ask("initialize", protocolVersion="2025-06-18")
            assert began["result"]["protocolVersion"] == "2025-06-18"
            notified = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            assert (await http.post(str(access.mcp_url), json=notified)).status_code == 202
            assert (await ask("tools/list"))["result"]["tools"][0]["name"] == "look"
            called = await ask("tools/call", name="look", arguments={"a": 1})
            assert called["result"]["content"][0]["text"] == "called with {'a': 1}"
            assert "error" in await ask("tools/call", name="nothing")
            assert "error" in await ask("resources/list")
            listed = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": [1]}
            refused = (await http.post(str(access.mcp_url), json=listed)).json()
            assert refused["error"]["message"] == "expected params by name, got [1]"
        key = {"authorization": f"Bearer {without_tools.episode.access.api_key}"}
        async with httpx.AsyncClient(headers=key) as http:
            payload = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            assert (await http.post(str(access.mcp_url), json=payload)).status_code == 404


async def test_the_published_mcp_client_lists_tools_and_calls_them(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, tools=Box()) as scripted:
        access = scripted.episode.access
        headers = {"authorization": f"Bearer {access.api_key}"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            streamable_http_client(str(access.mcp_url), http_client=http) as streams,
            ClientSession(*streams[:2]) as session,
        ):
            await session.initialize()
            assert [tool.name for tool in (await session.list_tools()).tools] == ["look"]
            called = await session.call_tool("look", {"a": 1})
            assert called.content[0].text == "called with {'a': 1}"  # type: ignore[union-attr]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_the_same_calls_after_the_same_history_have_the_same_ids_and_others_others(
    endpoint: AgentEndpoint, chat: ChatTokenizer, is_stream: bool
) -> None:
    ids = []
    for question in ("Where is the key?", "Where is the key?", "Where is the hat?"):
        with open_episode(endpoint, chat, CALL + CALL) as scripted:
            arguments: dict[str, Any] = {
                "model": "any",
                "messages": [{"role": "user", "content": question}],
                "tools": [TOOL],
            }
            if is_stream:
                stream = await scripted.client.chat.completions.create(**arguments, stream=True)
                deltas = [chunk.choices[0].delta async for chunk in stream]
                calls = [call for delta in deltas for call in delta.tool_calls or [] if call.id]
            else:
                completion = await scripted.client.chat.completions.create(**arguments)
                calls = completion.choices[0].message.tool_calls or []
            ids.append([call.id for call in calls])
    assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 4


async def test_both_forms_call_the_same_call_by_the_same_id(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with open_episode(endpoint, chat, CALL, CALL) as scripted:
        over_chat = await scripted.client.chat.completions.create(
            model="any", messages=HELLO, tools=[TOOL]
        )
        response = await scripted.client.responses.create(
            model="any",
            input=HELLO,
            tools=[FUNCTION],  # type: ignore[list-item]
        )
    [call] = over_chat.choices[0].message.tool_calls or []
    [item] = response.output
    assert item.type == "function_call" and item.call_id == call.id

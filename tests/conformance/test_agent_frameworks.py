"""Unmodified LangGraph and smolagents agents play episodes whose sampled tokens are trained on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from upstream_environment import UpstreamEnvironmentError

from ludus.proto.config import RolloutConfig
from ludus.trainer.core.types import SampledCompletion, Sampling
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.endpoint.server import AgentEndpoint
from tests.agents.exactness import RecordingEngine
from tests.agents.random_policy import make_tiny_chat
from tests.agents.wild_agent import assert_trained_tokens_are_exact
from tests.conformance.frameworks import (
    AGENTS_FOLDER,
    FRAMEWORKS,
    EpisodeCounts,
    find_python,
    make_command,
    measure,
    service,
)
from tests.conformance.parties import UPSTREAM_FOLDER
from tests.rollout.scripted_policy import ScriptedPolicy

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1200)]

LIMITS = RolloutConfig(max_completion_tokens=200, max_tokens=16_000, max_turns=40)
CALL = '<tool_call>{"name": "Look", "arguments": {"box": "red"}}</tool_call>'
LOGPROB_TOLERANCE = 1e-4
"""Tolerance of a log-prob computed in float32, in nats."""


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    """Return the name of a framework that can be installed."""
    find_interpreter(request.param)
    return request.param


def find_interpreter(framework: str) -> Path:
    """Return the framework's interpreter; skip the test if it cannot be installed."""
    try:
        return find_python(framework)
    except UpstreamEnvironmentError as error:
        pytest.skip(f"{framework} cannot be installed here: {error}")


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[AgentEndpoint]:
    agent_endpoint = AgentEndpoint()
    await agent_endpoint.start()
    yield agent_endpoint
    await agent_endpoint.stop()


async def run_scripted_program(
    endpoint: AgentEndpoint,
    framework: str,
    program: str,
    responses: tuple[str, ...],
    *arguments: str,
) -> tuple[dict[str, Any], ConversationTree]:
    """Run a program with scripted responses; return its output and the conversation tree."""
    chat = make_tiny_chat()
    recorder = RecordingEngine(_TruncatingPolicy(ScriptedPolicy(chat, iter(responses))))
    tree = ConversationTree(recorder, chat, LIMITS, Sampling(1.0, 1), key=0)
    with endpoint.open_episode(tree) as episode:
        access = episode.access
        program_process = await asyncio.create_subprocess_exec(
            *(
                find_interpreter(framework),
                UPSTREAM_FOLDER / program,
                access.base_url,
                access.api_key,
                *arguments,
            ),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        texts, errors = await program_process.communicate()
    assert program_process.returncode == 0, errors.decode()[-3000:]
    assert_trained_tokens_are_exact(tree.make_sequences(), recorder.samples)
    return json.loads(texts.splitlines()[-1]), tree


async def test_langchain_client_features_work_or_raise_unsupported_parameter(
    endpoint: AgentEndpoint,
) -> None:
    red_call = ["Look", {"box": "red"}]
    responses = (
        *("red", "green blue box" * 9, f"{CALL}{CALL}", f"Let me look.{CALL}", CALL, "green"),
        *(CALL, "one STOP two", "the key is here", "red", "green", "blue box"),
        *("a", "b", "c", "d"),
    )
    output, tree = await run_scripted_program(
        endpoint, "langgraph", "langchain_wishes.py", responses
    )
    assert (output["whole"]["text"], output["whole"]["finish_reason"]) == ("red", "stop")
    assert output["streamed"]["text"] == "green blue box" * 9
    assert output["streamed"]["num_pieces"] > 4 and output["streamed"]["num_tokens"] > 9
    # parallel_tool_calls = false drops the second of the two sampled calls.
    assert [call[:2] for call in output["call"]["calls"]] == [red_call]
    assert output["call"]["finish_reason"] == "tool_calls"
    assert [call[:2] for call in output["streamed_call"]["calls"]] == [red_call]
    assert output["streamed_call"]["text"].strip() == "Let me look."
    assert [call[:2] for call in output["responses_call"]["calls"]] == [red_call]
    assert output["responses_streamed"]["text"] == "green"
    assert output["structured"] == "red"
    assert output["stopped"]["text"].strip() == "one"
    assert (output["cut"]["num_tokens"], output["cut"]["finish_reason"]) == (2, "length")
    assert output["several"] == ["red", "green"]
    assert len(output["logprobs"]) > 0 and max(output["logprobs"]) <= 0.0
    assert sorted(branch["text"] for branch in output["at_once"]) == ["a", "b", "c", "d"]
    assert output["refused"] == ["unsupported_parameter response_format"] * 2
    assert tree.num_turns == len(responses)


@pytest.mark.parametrize("mode", ["whole", "streamed"])
async def test_smolagents_agent_solves_the_task_with_default_prompts(
    endpoint: AgentEndpoint, mode: str
) -> None:
    def call(name: str, **arguments: str) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    responses = (
        call("look", box="blue"),
        call("look", box="red"),
        "It is",
        call("final_answer", answer="red"),
    )
    output, tree = await run_scripted_program(
        endpoint, "smolagents", "smolagents_wishes.py", responses, mode
    )
    assert output["answer"] == "red"
    look_calls = [["look", {"box": "blue"}], ["look", {"box": "red"}]]
    assert output["calls"] == [*look_calls, ["final_answer", {"answer": "red"}]]
    assert len(output["errors"]) == 1  # "It is" contains no call, but a call was required
    first_turn, second_turn, *_ = tree.turns
    assert "look" in first_turn.messages[0]["content"]
    # The agent rewrites its calls as text.
    assert "Calling tools:" in second_turn.messages[-2]["content"]
    assert "nothing" in second_turn.messages[-1]["content"]


class _TruncatingPolicy:
    """A scripted policy whose completions are truncated at the requested limit."""

    def __init__(self, policy: ScriptedPolicy) -> None:
        self._policy = policy

    async def __call__(
        self, prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> SampledCompletion:
        completion = await self._policy(prompt_ids, sampling, seed)
        max_tokens = sampling.max_tokens
        if len(completion.token_ids) <= max_tokens:
            return completion
        return replace(
            completion,
            token_ids=completion.token_ids[:max_tokens],
            logprobs=completion.logprobs[:max_tokens],
            has_end_token=False,
        )


def check_counts(counts: EpisodeCounts, num_episodes: int) -> None:
    assert (counts.num_episodes, counts.failures) == (num_episodes, [])
    assert counts.num_answers >= num_episodes and counts.num_tool_calls > 0
    assert counts.largest_logprob_error < LOGPROB_TOLERANCE


async def test_agent_service_trains_on_sampled_tokens_of_concurrent_episodes(
    framework: str, tmp_path: Path
) -> None:
    with service(framework, tmp_path) as url:
        counts = await measure({"url": url, "max_concurrent": 8}, num_episodes=24)
    check_counts(counts, 24)
    assert counts.most_at_once > 1
    if framework == "langgraph":  # its history only grows, so an episode is one sequence
        assert counts.num_sequences == counts.num_episodes < counts.num_answers


async def test_agent_program_connects_through_environment_variables(
    framework: str, tmp_path: Path
) -> None:
    program = {
        "command": make_command(framework),
        "folder": str(AGENTS_FOLDER),
        "max_concurrent": 2,
    }
    with service(framework, tmp_path) as url:
        counts = await measure(program, num_episodes=6, teacher={"url": url, "max_concurrent": 8})
    check_counts(counts, 6)

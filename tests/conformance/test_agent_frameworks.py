"""Unmodified agents of LangGraph and smolagents: their requests are served and trained on."""

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
from tests.agents.wild_agent import check_exact
from tests.conformance.frameworks import (
    AGENTS,
    FRAMEWORKS,
    Measured,
    find_python,
    make_program,
    measure,
    service,
)
from tests.conformance.parties import UPSTREAM
from tests.rollout.scripted_policy import ScriptedPolicy

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1200)]

LIMITS = RolloutConfig(max_completion_tokens=200, max_tokens=16_000, max_turns=40)
CALL = '<tool_call>{"name": "Look", "arguments": {"box": "red"}}</tool_call>'
TOLERANCE = 1e-4
"""Tolerance of a log-prob in float32, in nats."""


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    """Return the name of a framework."""
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


async def run_scripted(
    endpoint: AgentEndpoint, framework: str, program: str, answers: tuple[str, ...], *arguments: str
) -> tuple[dict[str, Any], ConversationTree]:
    """Return the output of a program with scripted responses, and check the kept tokens."""
    chat = make_tiny_chat()
    recorded = RecordingEngine(_TruncatingPolicy(ScriptedPolicy(chat, iter(answers))))
    tree = ConversationTree(recorded, chat, LIMITS, Sampling(1.0, 1), key=0)
    with endpoint.open_episode(tree) as episode:
        access = episode.access
        program_process = await asyncio.create_subprocess_exec(
            *(
                find_interpreter(framework),
                UPSTREAM / program,
                access.base_url,
                access.api_key,
                *arguments,
            ),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        texts, errors = await program_process.communicate()
    assert program_process.returncode == 0, errors.decode()[-3000:]
    check_exact(tree.make_sequences(), recorded.samples)
    return json.loads(texts.splitlines()[-1]), tree


async def test_langchain_client_features_work_or_raise_unsupported_parameter(
    endpoint: AgentEndpoint,
) -> None:
    red_call = ["Look", {"box": "red"}]
    answers = (
        *("red", "green blue box" * 9, f"{CALL}{CALL}", f"Let me look.{CALL}", CALL, "green"),
        *(CALL, "one STOP two", "the key is here", "red", "green", "blue box"),
        *("a", "b", "c", "d"),
    )
    measured, tree = await run_scripted(endpoint, "langgraph", "langchain_wishes.py", answers)
    assert (measured["whole"]["text"], measured["whole"]["finish_reason"]) == ("red", "stop")
    assert measured["streamed"]["text"] == "green blue box" * 9
    assert measured["streamed"]["num_pieces"] > 4 and measured["streamed"]["num_tokens"] > 9
    # parallel_tool_calls = false: of two sampled calls, one is made.
    assert [call[:2] for call in measured["call"]["calls"]] == [red_call]
    assert measured["call"]["finish_reason"] == "tool_calls"
    assert [call[:2] for call in measured["streamed_call"]["calls"]] == [red_call]
    assert measured["streamed_call"]["text"].strip() == "Let me look."
    assert [call[:2] for call in measured["responses_call"]["calls"]] == [red_call]
    assert measured["responses_streamed"]["text"] == "green"
    assert measured["structured"] == "red"
    assert measured["stopped"]["text"].strip() == "one"
    assert (measured["cut"]["num_tokens"], measured["cut"]["finish_reason"]) == (2, "length")
    assert measured["several"] == ["red", "green"]
    assert len(measured["logprobs"]) > 0 and max(measured["logprobs"]) <= 0.0
    assert sorted(branch["text"] for branch in measured["at_once"]) == ["a", "b", "c", "d"]
    assert measured["refused"] == ["unsupported_parameter response_format"] * 2
    assert tree.num_turns == len(answers)


@pytest.mark.parametrize("mode", ["whole", "streamed"])
async def test_smolagents_agent_solves_the_task_with_default_prompts(
    endpoint: AgentEndpoint, mode: str
) -> None:
    def call(name: str, **arguments: str) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    answers = (
        call("look", box="blue"),
        call("look", box="red"),
        "It is",
        call("final_answer", answer="red"),
    )
    measured, tree = await run_scripted(
        endpoint, "smolagents", "smolagents_wishes.py", answers, mode
    )
    assert measured["answer"] == "red"
    look_calls = [["look", {"box": "blue"}], ["look", {"box": "red"}]]
    assert measured["calls"] == [*look_calls, ["final_answer", {"answer": "red"}]]
    assert len(measured["errors"]) == 1  # "It is" contains no call, although a call was required
    first_turn, second_turn, *_ = tree.turns
    assert "look" in first_turn.messages[0]["content"]
    # The agent writes calls in its own words.
    assert "Calling tools:" in second_turn.messages[-2]["content"]
    assert "nothing" in second_turn.messages[-1]["content"]


class _TruncatingPolicy:
    """A scripted policy that cuts its completions at the requested limit."""

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


def check_counts(measured: Measured, num_episodes: int) -> None:
    assert (measured.num_episodes, measured.failures) == (num_episodes, [])
    assert measured.num_answers >= num_episodes and measured.num_tool_calls > 0
    assert measured.largest_logprob_error < TOLERANCE


async def test_agent_service_trains_on_sampled_tokens_of_concurrent_episodes(
    framework: str, tmp_path: Path
) -> None:
    with service(framework, tmp_path) as url:
        measured = await measure({"url": url, "max_concurrent": 8}, num_episodes=24)
    check_counts(measured, 24)
    assert measured.most_at_once > 1
    if framework == "langgraph":  # a growing history is one sequence
        assert measured.num_sequences == measured.num_episodes < measured.num_answers


async def test_agent_program_connects_through_environment_variables(
    framework: str, tmp_path: Path
) -> None:
    program = {"command": make_program(framework), "folder": str(AGENTS), "max_concurrent": 2}
    with service(framework, tmp_path) as url:
        measured = await measure(program, num_episodes=6, teacher={"url": url, "max_concurrent": 8})
    check_counts(measured, 6)

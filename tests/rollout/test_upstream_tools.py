"""Tests of the tools of an OpenEnv MCPEnvironment on a Ludus server and on an OpenEnv server."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.trainer.core.types import RolloutStatus, SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.adapters.tool_adapter import Toolbox
from tests.env.upstream_sdk import SOURCES, get_upstream_python
from tests.rollout.chat_templates import QWEN25, make_family_tokenizer
from tests.rollout.scripted_policy import make_runner, play_once
from tests.rollout.test_tools import LIMITS, format_call

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(params=["ludus-grpc", "ludus-http", "openenv-http"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Start a server with OpenEnv's tool environment and yield its address."""
    server_kind, _, wire = request.param.partition("-")
    ready_file = tmp_path / "ready.json"
    command = [
        get_upstream_python("0.10.0"),
        "tests/rollout/upstream_tools_program.py",
        server_kind,
        ready_file,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        deadline_s = time.monotonic() + 240
        while not (ready_file.exists() and ready_file.read_text()):
            assert process.poll() is None, (
                f"server exited with code {process.returncode} before it was ready"
            )
            assert time.monotonic() < deadline_s, "server was not ready within 240 s"
            time.sleep(0.05)
        yield json.loads(ready_file.read_text())[wire]
    finally:
        process.kill()
        process.wait()


async def test_policy_calls_listed_tools_and_ends_the_episode_with_text(address: str) -> None:
    chat = ChatTokenizer(make_family_tokenizer(QWEN25))
    completions = iter(
        [format_call("shout"), format_call("echo", message="17 and 4"), "It said 17 and 4."]
    )
    prompts: list[str] = []

    async def generate(prompt_ids: list[int], sampling: Sampling, seed: int) -> SampledCompletion:
        prompts.append(chat.tokenizer.decode(prompt_ids))
        token_ids = chat.encode_completion(next(completions))
        return SampledCompletion(token_ids, [-1.0] * len(token_ids), 0, has_end_token=True)

    async with await AsyncEnvClient.connect(
        address, ConnectOptions(connect_timeout_s=60)
    ) as client:
        toolbox = Toolbox(client, "tools")
        runner = make_runner(client, chat, generate, LIMITS, toolbox=toolbox)
        episode = await play_once(runner, 5)
    assert '"name": "echo"' in prompts[0]
    results = [message["content"] for message in episode.completion if message["role"] == "tool"]
    assert "expected one of the tools echo, got 'shout'" in results[0]
    assert "17 and 4" in results[1]
    assert episode.rollout.status is RolloutStatus.TERMINATED
    assert len(episode.rollout.turns) == 3
    assert (episode.rollout.num_tool_calls, episode.rollout.num_tool_calls_failed) == (2, 1)

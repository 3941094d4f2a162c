"""Tests of episodes that agents play: results, limits and failures."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.listeners import HttpListener, bind
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import AgentConfig, CommandAgent, RewardTerm, RolloutConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.core.types import GroupSpec, Rollout, RolloutGroup, RolloutStatus
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.adapters.environment_adapter import ServerRenderer
from ludus.trainer.rollout.adapters.tool_adapter import Toolbox
from ludus.trainer.rollout.agents.endpoint.server import EndpointAccess
from ludus.trainer.rollout.agents.launchers import AgentTask, ProgramLauncher
from ludus.trainer.rollout.agents.programs import check_agent
from ludus.trainer.rollout.agents.runner import AgentHost, AgentRunner
from ludus.trainer.rollout.rewards.scoring import Reward
from tests.agents import functions
from tests.rollout.calculator_env import CalculatorEnv
from tests.rollout.scripted_policy import ScriptedPlayer, ScriptedPolicy

LIMITS = RolloutConfig(max_completion_tokens=8, max_tokens=256, max_turns=4)
PROGRAM = Path(__file__).with_name("program.py")
ROOT = Path(__file__).parents[2]


def parse_agent(fields: dict[str, Any]) -> Any:
    return TypeAdapter(AgentConfig).validate_python({"timeout_s": 20.0, **fields})


@asynccontextmanager
async def open_player(
    client: AsyncEnvClient,
    chat: ChatTokenizer,
    fields: dict[str, Any],
    completions: tuple[str, ...] = ("STAND",),
    **runner_fields: Any,
) -> AsyncIterator[ScriptedPlayer]:
    """Yield a player that runs the agent with a scripted policy."""
    script = itertools.cycle(completions)
    policy = ScriptedPolicy(chat, script)
    reward = runner_fields.pop("reward", None) or Reward()
    async with AsyncExitStack() as stack:
        runner = AgentRunner(
            agent=await AgentHost.start(parse_agent(fields), stack),
            environment="game",
            client=client,
            generate=policy,
            chat=chat,
            renderer=ServerRenderer("game"),
            limits=LIMITS,
            **runner_fields,
        )
        yield ScriptedPlayer(runner, reward)


async def play_group(
    client: AsyncEnvClient, chat: ChatTokenizer, function: Any, **fields: Any
) -> RolloutGroup:
    path = f"tests.agents.functions:{function.__name__}"
    async with open_player(client, chat, {"function": path, **fields}) as player:
        spec = GroupSpec(0, "game", (11, 11))
        return await player.play_group(spec, num_transcripts=1)


async def play_episode(
    client: AsyncEnvClient, chat: ChatTokenizer, function: Any, **fields: Any
) -> Rollout:
    return (await play_group(client, chat, function, **fields)).rollouts[0]


@pytest.mark.slow
async def test_agent_result_is_played_and_sampled_tokens_are_recorded(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    group = await play_group(client, chat, functions.return_completion)
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.TERMINATED
        assert rollout.reward == rollout.turns[-1].reward != 0
        [sequence] = rollout.sequences
        assert chat.decode(sequence.token_ids[sequence.loss_mask].tolist()) == "STAND"
    [transcript] = group.transcripts
    [turn] = transcript.turns
    assert (turn.shown[0].text, turn.answer) == ("hard 11 vs 2", "STAND")
    assert turn.action == {"text": "STAND"}


@pytest.mark.slow
async def test_agent_fields_reach_reward_functions_and_agent_reward_counts(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    columns: dict[str, Any] = {}
    reward = Reward(
        [RewardTerm(), RewardTerm(function="tests.agents.test_player:record_kind_and_prompts")]
    )
    fields = {"function": "tests.agents.functions:return_completion"}
    async with open_player(client, chat, fields, reward=reward) as player:
        RECORDED_COLUMNS.clear()
        await player.play_group(GroupSpec(0, "game", (11, 12)))
        columns.update(RECORDED_COLUMNS)
    assert columns["kind"] == ["passes on"] * 2
    assert columns["prompts"][0][0]["content"] == "hard 11 vs 2"
    plain_rollout = await play_episode(client, chat, functions.return_completion)
    agent_rewarded_rollout = await play_episode(client, chat, functions.complete_in_thread)
    assert agent_rewarded_rollout.reward == (plain_rollout.reward or 0) + 0.25


@pytest.mark.slow
async def test_agent_can_be_an_asynchronous_callable_object(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    fields = {"function": "tests.agents.functions:agent_object"}
    async with open_player(client, chat, fields) as player:
        group = await player.play_group(GroupSpec(0, "game", (11,)))
    assert group.rollouts[0].status is RolloutStatus.TERMINATED, group.rollouts[0].failure


async def test_task_with_braces_is_passed_unchanged() -> None:
    commands: list[list[str]] = []

    class Host:
        async def run(self, command: list[str], **_: Any) -> Any:
            commands.append(command)
            return SimpleNamespace(exit_code=0, output="", errors="")

    config = CommandAgent(command=(sys.executable, "{task}", "say: {text}"))
    launcher = ProgramLauncher(config, Host())  # type: ignore[arg-type]
    task = AgentTask("{task}", [], {"shown": "{text}"}, {}, 1)
    await launcher.run(task, EndpointAccess("http://127.0.0.1:1/v1", "sk"))
    assert json.loads(commands[0][1])["observation"] == {"shown": "{text}"}
    assert commands[0][2] == "say: {task}"


RECORDED_COLUMNS: dict[str, Any] = {}


def record_kind_and_prompts(kind: list[str], prompts: list[Any], **_: Any) -> list[float]:
    RECORDED_COLUMNS.update(kind=kind, prompts=prompts)
    return [0.0] * len(kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (functions.raise_key_error, "KeyError"),
        (functions.exit_process, "SystemExit: 3"),
        (functions.send_no_request, "sent no request to the policy"),
        (functions.return_plain_text, "expected JSON"),
        (functions.hang, "timeout_s = 0.5"),
    ],
)
async def test_failed_agent_voids_the_episode_with_the_reason(
    client: AsyncEnvClient, chat: ChatTokenizer, function: Any, reason: str
) -> None:
    timeout_s = 0.5 if function is functions.hang else 20.0
    rollout = await play_episode(client, chat, function, timeout_s=timeout_s)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert reason in rollout.failure and rollout.has_agent_failed


@pytest.mark.slow
async def test_agent_beyond_the_turn_limit_is_truncated(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    rollout = await play_episode(client, chat, functions.exceed_turn_limit)
    assert rollout.status is RolloutStatus.TRUNCATED
    assert (rollout.reward, len(rollout.turns)) == (0.0, LIMITS.max_turns)
    assert not rollout.has_agent_failed


@pytest.mark.slow
async def test_parallel_requests_are_counted_as_branches(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    rollout = await play_episode(client, chat, functions.send_parallel_requests)
    assert rollout.status is RolloutStatus.TERMINATED
    assert (len(rollout.sequences), rollout.num_branches) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("text", RolloutStatus.TERMINATED),
        ("last_message", RolloutStatus.TERMINATED),
        ("none", RolloutStatus.TERMINATED),
    ],
)
async def test_action_is_agent_text_last_policy_message_or_none(
    client: AsyncEnvClient, chat: ChatTokenizer, answer: str, status: RolloutStatus
) -> None:
    rollout = await play_episode(client, chat, functions.return_plain_text, answer=answer)
    assert rollout.status is status
    assert (rollout.reward == 0) == (answer == "none")


@pytest.mark.slow
async def test_agent_calls_environment_tools_and_calls_are_counted(
    chat: ChatTokenizer,
) -> None:
    options = ServerOptions(port=0)
    async with (
        EnvServer(CalculatorEnv, options) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        fields = {"function": "tests.agents.functions:call_tools"}
        toolbox = Toolbox(client, "calculator")
        async with open_player(client, chat, fields, toolbox=toolbox) as player:
            rollout = (await player.play_group(GroupSpec(0, "game", (1,)))).rollouts[0]
    assert rollout.status is RolloutStatus.TERMINATED, rollout.failure
    assert (rollout.num_tool_calls, rollout.num_tool_calls_failed) == (2, 1)


@pytest.mark.long
@pytest.mark.slow
async def test_program_is_isolated_and_stops_with_child_processes(
    client: AsyncEnvClient, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TEST_SECRET", "s3cret")
    RECORDED_COLUMNS.clear()
    reward = Reward([RewardTerm(), RewardTerm(function="tests.agents.test_player:record_columns")])
    command = [sys.executable, str(PROGRAM), "answer", "{text}"]
    fields = {"command": command, "folder": str(ROOT)}
    async with open_player(client, chat, fields, reward=reward) as player:
        group = await player.play_group(GroupSpec(0, "game", (11,)))
    assert group.rollouts[0].status is RolloutStatus.TERMINATED, group.rollouts[0].failure
    assert RECORDED_COLUMNS == {"secret": ["none"], "text": ["hard 11 vs 2"]}

    fields = {**fields, "command": [sys.executable, str(PROGRAM), "crash"]}
    async with open_player(client, chat, fields) as player:
        group = await player.play_group(GroupSpec(0, "game", (11,)))
    assert "exit code 1" in group.rollouts[0].failure
    assert "no such file: weights.bin" in group.rollouts[0].failure

    fields = {**fields, "command": [sys.executable, str(PROGRAM), "hang"], "timeout_s": 8.0}
    async with open_player(client, chat, fields) as player:
        group = await player.play_group(GroupSpec(0, "game", (11,)))
    assert "timeout_s" in group.rollouts[0].failure
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "4242"] not in commands


def record_columns(secret: list[str], text: list[str], **_: Any) -> list[float]:
    RECORDED_COLUMNS.update(secret=secret, text=text)
    return [0.0] * len(secret)


@pytest.mark.slow
async def test_service_gets_task_and_key_and_episode_is_lost_if_service_stops(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    async def solve(request: Request) -> Response:
        payload = await request.json()
        task = AgentTask(**payload.pop("task"))
        if task.seed == 13:
            return JSONResponse({"detail": "no more rooms"}, 500)
        return JSONResponse(await functions.return_completion(task, EndpointAccess(**payload)))

    app = Starlette(routes=[Route("/solve", solve, methods=["POST"])])
    service = HttpListener(app, bind("127.0.0.1", 0, "port"))
    await service.start()
    fields = {"url": f"http://127.0.0.1:{service.port}/solve"}
    async with open_player(client, chat, fields) as player:
        group = await player.play_group(GroupSpec(0, "game", (11, 13)))
        await service.stop()
        group_after_stop = await player.play_group(GroupSpec(1, "game", (11,)))
    rollout, void_rollout = group.rollouts
    assert rollout.status is RolloutStatus.TERMINATED
    assert void_rollout.status is RolloutStatus.FAILED and "no more rooms" in void_rollout.failure
    assert group_after_stop.rollouts[0].status is RolloutStatus.LOST
    assert not group_after_stop.rollouts[0].has_agent_failed


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("names", [("HTTP_PROXY", "NO_PROXY"), ("http_proxy", "no_proxy")])
async def test_requests_to_loopback_take_no_proxy(
    names: tuple[str, str],
    client: AsyncEnvClient,
    chat: ChatTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(names[0], "http://127.0.0.1:9")
    monkeypatch.setenv(names[1], "example.org")
    rollout = await play_episode(client, chat, functions.return_completion)
    assert rollout.status is RolloutStatus.TERMINATED
    command = [sys.executable, str(PROGRAM), "answer", "{text}"]
    fields = {"command": command, "folder": str(ROOT), "pass_env": list(names)}
    async with open_player(client, chat, fields) as player:
        group = await player.play_group(GroupSpec(0, "game", (11,)))
    assert group.rollouts[0].status is RolloutStatus.TERMINATED
    assert os.environ["NO_PROXY"].startswith("example.org,127.0.0.1")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": ["no-such-program"]}, "program 'no-such-program' in PATH"),
        ({"command": ["python"], "folder": "/no/such/folder"}, "there is no folder"),
        ({"function": "tests.agents.functions:nothing"}, "has no callable 'nothing'"),
    ],
)
def test_missing_agent_files_and_functions_are_reported_before_the_run(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_agent(parse_agent(fields))

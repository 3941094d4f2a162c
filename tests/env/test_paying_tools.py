"""Tools that pay a reward or end the episode, over every wire."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from websockets.asyncio.client import connect

from ludus.env import ToolResult
from ludus.env.check import check_environment
from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.contract.players import CheckedEnvironment, draw_legal_action
from ludus.env.contract.rules import BrokenRuleError, tools_return_json_objects
from ludus.env.http.app import build_app
from ludus.env.recording.format import RecordedEpisode, read_recording
from ludus.env.recording.verify import replay_episode
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import make_local_host
from ludus.env.sessions.options import ServerOptions
from ludus.proto.errors import EpisodeStateError, ErrorCode, SessionLostError, ToolError
from tests.env.paying_env import PayingEnv
from tests.env.served import serve, server_address
from tests.env.test_isolation import serve_workers
from tests.gateway.gateways import connect_client, count_sessions, get_sessions, run_gateway

RIGHT = ToolResult({"right": True}, 1.0, terminated=True, success=True)


class ThreadedPayingEnv(PayingEnv):
    """PayingEnv with steps in threads."""

    steps_on_event_loop = False


async def submit(session: AsyncSession, word: str = "moon") -> ToolResult:
    return await session.call_tool("submit", {"word": word})


@pytest.mark.parametrize("factory", [PayingEnv, ThreadedPayingEnv])
async def test_tool_pays_and_ends_the_episode(wire: str, factory: type[PayingEnv]) -> None:
    async with (
        serve(factory) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        session, _ = await client.open(seed=1)
        assert await session.call_tool("look") == ToolResult({"word": "moon"})
        assert await session.call_tool("tip") == ToolResult({"paid": True}, reward=0.5)
        assert (await session.step({"add": 1})).step_index == 1
        assert await submit(session) == RIGHT
        with pytest.raises(EpisodeStateError) as caught:
            await session.step({"add": 1})
        assert caught.value.code is ErrorCode.EPISODE_OVER
        for name in ("submit", "tip"):
            # OpenEnv's protocol has one error for all failures of a tool.
            with pytest.raises(ToolError if wire == "http" else EpisodeStateError, match="is over"):
                await session.call_tool(name)
        assert (await session.call_tool("look")).content == {"word": "moon"}
        await session.reset(seed=2)
        assert await submit(session, "sun") == ToolResult(
            {"right": False}, 0.0, terminated=True, success=False
        )
        await session.reset(seed=3)
        assert (await session.step({"add": 1})).step_index == 1
        assert await session.call_tool("give_up") == ToolResult({}, truncated=True)


@pytest.mark.slow
async def test_tool_in_a_worker_process_pays_and_ends_the_episode() -> None:
    async with (
        serve_workers(PayingEnv, "pool") as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        session, _ = await client.open(seed=1, close_when_done=True)
        other_session, _ = await client.open(seed=1)
        assert await session.call_tool("tip") == ToolResult({"paid": True}, reward=0.5)
        assert await submit(session) == RIGHT
        with pytest.raises(SessionLostError, match="its episode ended"):
            await session.step({"add": 1})
        assert await submit(other_session, "sun") == ToolResult(
            {"right": False}, 0.0, terminated=True, success=False
        )
        with pytest.raises(EpisodeStateError, match="is over"):
            await other_session.call_tool("tip")
        assert (await other_session.call_tool("look")).content == {"word": "moon"}
        await other_session.reset(seed=2)
        assert await other_session.call_tool("give_up") == ToolResult({}, truncated=True)
        assert server.core.load.num_sessions == 1


@pytest.mark.slow
async def test_mcp_clients_get_the_reward_of_a_tool_in_a_worker_process() -> None:
    async with (
        serve_workers(PayingEnv, "pool") as server,
        streamable_http_client(server.http_address + "/mcp") as streams,
        ClientSession(streams[0], streams[1]) as session,
    ):
        await session.initialize()
        await session.call_tool("start_episode", {"seed": 1})
        assert (await session.call_tool("look", {})).meta is None
        tip = await session.call_tool("tip", {})
        assert tip.structured_content == {"paid": True}
        assert tip.meta == {"ludus/reward": 0.5, "ludus/done": False, "ludus/success": None}
        result = await session.call_tool("submit", {"word": "moon"})
        assert result.structured_content == {"right": True}
        assert result.meta == {"ludus/reward": 1.0, "ludus/done": True, "ludus/success": True}
        refusal = await session.call_tool("tip", {})
        assert refusal.is_error and "the episode is over" in refusal.content[0].text


async def test_call_that_ends_the_episode_closes_the_session_on_request(wire: str) -> None:
    async with (
        serve(PayingEnv) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        session, _ = await client.open(seed=1, close_when_done=True)
        await session.call_tool("tip")
        assert server.core.load.num_sessions == 1
        assert await submit(session) == RIGHT
        with pytest.raises(SessionLostError, match="its episode ended"):
            await session.step({"add": 1})
        if wire == "grpc":
            assert server.core.load.num_sessions == 0


async def test_gateway_forwards_the_reward_and_frees_the_slot() -> None:
    async with run_gateway(1, factory=PayingEnv) as (gateway, servers):
        async with connect_client(gateway) as client:
            session, _ = await client.open(seed=1, close_when_done=True)
            assert await submit(session) == RIGHT
        assert count_sessions(servers) == 0
        assert get_sessions(gateway).load.num_sessions == 0


async def test_openenv_clients_get_the_reward_in_the_payload_of_the_step() -> None:
    action = {"type": "call_tool", "tool_name": "submit", "arguments": {"word": "moon"}}
    async with (
        serve(PayingEnv) as server,
        connect(server.http_address.replace("http", "ws") + "/ws") as socket,
    ):

        async def send(message: dict[str, Any]) -> dict[str, Any]:
            await socket.send(json.dumps(message))
            return json.loads(await socket.recv())["data"]

        await send({"type": "reset", "data": {"seed": 1}})
        payload = await send({"type": "step", "data": action})
        refusal = await send({"type": "step", "data": action})
    assert (payload["reward"], payload["done"]) == (1.0, True)
    assert payload["observation"].keys() == {"tool_name", "result", "error"}
    assert payload["observation"]["result"]["data"] == {"right": True}
    assert payload["metadata"] == {"success": True}
    assert "the episode is over" in refusal["observation"]["error"]["message"]


async def test_mcp_clients_get_the_reward_beside_the_content() -> None:
    core = SessionCore(make_local_host(PayingEnv), ServerOptions())
    transport = httpx.ASGITransport(build_app(core))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
            params = {"name": name, "arguments": arguments}
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            return (await client.post("/mcp", json=request)).json()["result"]

        assert "_meta" not in await call("look", {})
        result = await call("submit", {"word": "moon"})
    assert result["structuredContent"] == {"right": True}
    assert result["_meta"] == {
        "ludus/reward": 1.0,
        "ludus/done": True,
        "ludus/success": True,
    }


async def record_episode(path: Path) -> RecordedEpisode:
    async with (
        serve(PayingEnv, record=path) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        session, _ = await client.open(seed=3)
        await session.call_tool("look")
        await session.call_tool("tip")
        await session.step({"add": 1})
        await submit(session)
        (episode,) = read_recording(path)  # written at its end, before the session ends
    return episode


async def find_differences(episodes: Iterable[RecordedEpisode]) -> list[str]:
    async with (
        serve(PayingEnv) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        return [(await replay_episode(client, episode)).difference for episode in episodes]


async def test_recording_contains_the_rewards_of_tools(tmp_path: Path) -> None:
    episode = await record_episode(tmp_path / "played.jsonl")
    assert episode.end_reason == "terminated"
    assert [step.tool for step in episode.steps] == ["look", "tip", None, "submit"]
    step_reward = episode.steps[2].result.reward or 0.0
    assert episode.episode_return == 1.5 + step_reward
    other_reward = episode.model_copy(deep=True)
    other_reward.steps[1].result.reward = 0.75
    no_end = episode.model_copy(deep=True)
    no_end.steps[3].result = None
    assert await find_differences([episode, other_reward, no_end]) == [
        "",
        "step 2: expected reward 0.75, got 0.5",
        "step 4: expected reward None, got 1.0",
    ]


async def test_paid_calls_are_replayed_in_the_replacement_session() -> None:
    async with (
        serve(PayingEnv, check_determinism=True) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        session, _ = await client.open(seed=1, resume=True)
        await session.call_tool("tip")
        for session_id in list(server.core.open_sessions):
            await server.core.close(session_id)
        assert await submit(session) == RIGHT
        assert session.num_resumes == 1


class WrongResultEnv(PayingEnv):
    """PayingEnv whose result of the tool `tip` has a value of a wrong type."""

    tip = ToolResult({"paid": True}, reward=0.5)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any] | ToolResult:
        return self.tip if name == "tip" else super().call_tool(name, arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terminated": 1}, "expected terminated to be a bool from the tool 'tip'"),
        ({"reward": float("nan")}, "expected a reward that is"),
        ({"success": True}, "expected success None before the end of an episode from the tool"),
        ({"content": ["paid"]}, "expected a JSON object from the tool 'tip'"),
    ],
)
def test_check_names_wrong_results_of_tools(changes: dict[str, Any], message: str) -> None:
    class ChangedEnv(WrongResultEnv):
        tip = replace(WrongResultEnv.tip, **changes)

    subject = CheckedEnvironment(ChangedEnv, (1,), 2, draw_legal_action)
    with pytest.raises(BrokenRuleError, match=message):
        tools_return_json_objects(subject)


@pytest.mark.slow
def test_check_accepts_tools_that_pay() -> None:
    check_environment(PayingEnv).raise_if_failed()

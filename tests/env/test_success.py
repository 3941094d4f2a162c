"""Success reports of environments over every wire and in recordings."""

import json
from pathlib import Path

import httpx
import orjson
import pytest
import websockets

from ludus.env.check.check import check_environment
from ludus.env.client import AsyncEnvClient
from ludus.env.encoding import EncodedResult
from ludus.env.messages.openenv import make_upstream_payload
from ludus.env.messages.protobuf import read_encoded_result, read_result
from ludus.env.recording.format import read_recording
from ludus.env.recording.verify import replay_episode
from ludus.env.serving.loopback import open_client
from ludus.env.transports.openenv import OpenEnvTransport
from ludus.proto.env.v1 import env_pb2 as pb
from tests.env.counting_env import CountingEnv
from tests.env.goal_env import LOSING_ACTIONS, TRUNCATING_ACTIONS, WINNING_ACTIONS, GoalEnv
from tests.env.served import WIRES, serve, server_address

pytestmark = pytest.mark.asyncio

ENDINGS = [(WINNING_ACTIONS, True), (LOSING_ACTIONS, False), (TRUNCATING_ACTIONS, False)]


async def collect_successes(client: AsyncEnvClient, actions: list) -> list[bool | None]:
    """Play an episode; return the success field of each result."""
    session, first_result = await client.open(seed=3)
    results = [first_result, *[await session.step(action) for action in actions]]
    await session.close()
    return [result.success for result in results]


@pytest.mark.parametrize("isolation", ["inline", pytest.param("pool", marks=pytest.mark.slow)])
@pytest.mark.parametrize("wire", WIRES)
async def test_success_is_only_in_the_last_result(wire: str, isolation: str) -> None:
    async with (
        serve(GoalEnv, isolation=isolation) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        for actions, success in ENDINGS:
            assert await collect_successes(client, actions) == [None] * len(actions) + [success]


@pytest.mark.parametrize("wire", WIRES)
async def test_success_is_none_if_not_reported(wire: str) -> None:
    async with (
        serve(CountingEnv) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        assert set(await collect_successes(client, WINNING_ACTIONS)) == {None}


async def test_upstream_clients_read_success_in_metadata() -> None:
    async with serve(GoalEnv) as server:
        address = server.http_address.replace("http", "ws")
        async with websockets.connect(f"{address}/ws") as socket:
            await socket.send(json.dumps({"type": "reset", "data": {"seed": 3, "note": "k"}}))
            messages = [json.loads(await socket.recv())["data"]]
            for action in WINNING_ACTIONS:
                await socket.send(json.dumps({"type": "step", "data": action}))
                messages.append(json.loads(await socket.recv())["data"])
        assert set(messages[-1]) == {"observation", "reward", "done", "metadata"}
        assert [message.get("metadata") for message in messages] == [
            {"note": "k"},
            *[None] * 4,
            {"success": True},
        ]
        assert messages[-1]["observation"]["metadata"] == {}


@pytest.mark.slow
async def test_http_reports_success_in_metadata() -> None:
    async with (
        serve(GoalEnv) as server,
        httpx.AsyncClient(base_url=server.http_address) as http_client,
    ):
        await http_client.post("/reset", json={"seed": 3})
        replies = [
            (await http_client.post("/step", json={"action": action})).json()
            for action in LOSING_ACTIONS
        ]
        assert [reply.get("metadata") for reply in replies] == [*[None] * 4, {"success": False}]


async def test_openenv_client_reads_success_in_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenEnvTransport, "has_extensions", False)
    async with (
        serve(GoalEnv) as server,
        await AsyncEnvClient.connect(server.http_address) as client,
    ):
        for actions, success in ENDINGS:
            assert await collect_successes(client, actions) == [None] * len(actions) + [success]


async def test_success_is_added_to_existing_metadata() -> None:
    result = EncodedResult(1, b"{}", b'{"note":"k"}', b"", 1.0, True, False, {}, None, success=True)
    message = orjson.loads(orjson.dumps(make_upstream_payload(result)))
    assert message["metadata"] == {"note": "k", "success": True}


async def test_success_is_none_in_a_message_without_the_field() -> None:
    message = pb.StepResult(observation_json=b"{}", terminated=True)
    assert (read_result(message).success, read_encoded_result(message).success) == (None, None)


@pytest.mark.slow
async def test_recording_contains_success_and_replay_compares_success(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    async with (
        serve(GoalEnv, record=path) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        for actions, _ in ENDINGS:
            await collect_successes(client, actions)
    episodes = list(read_recording(path))
    assert [episode.steps[-1].result.success for episode in episodes] == [True, False, False]
    async with open_client(GoalEnv) as client:
        replays = [await replay_episode(client, episode) for episode in episodes]
        assert not any(replay.difference for replay in replays)
    async with open_client(CountingEnv) as client:
        replay = await replay_episode(client, episodes[0])
        assert replay.difference == "step 5: expected success True, got None"


class EarlySuccessEnv(GoalEnv):
    def reset(self, *, seed=None):
        transition = super().reset(seed=seed)
        transition.success = False
        return transition


class IntegerSuccessEnv(GoalEnv):
    def step(self, action):
        transition = super().step(action)
        transition.success = int(transition.success) if transition.success is not None else None
        return transition


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "broken_checks"),
    [
        (GoalEnv, []),
        (CountingEnv, []),
        (EarlySuccessEnv, ["success_is_reported_at_the_end"]),
        (IntegerSuccessEnv, ["success_is_reported_at_the_end"]),
    ],
)
async def test_check_finds_invalid_success(factory, broken_checks) -> None:
    report = check_environment(factory, num_steps=20)
    assert [check.name for check in report.checks if check.verdict == "broken"] == broken_checks

"""Episodes through a gateway equal those on the servers, over every wire."""

import asyncio
import json

import httpx
import pytest
import requests
import websockets

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.proto.errors import IllegalActionError, InvalidCallError
from ludus.services.gateway.gateway import Gateway
from tests.env.goal_env import LOSING_ACTIONS, WINNING_ACTIONS, GoalEnv
from tests.env.polling import wait_until
from tests.gateway.gateways import (
    NAME,
    connect_client,
    count_sessions,
    http_client,
    make_config,
    make_server,
    run_gateway,
)

pytestmark = pytest.mark.asyncio

TOKEN = "token-of-the-whole-gateway"
ACTIONS = [{"add": 1}, {"add": 8}, {"add": 2}, {"add": 3}, {"add": 1}]


async def play_episode(address: str) -> list:
    async with await AsyncEnvClient.connect(address) as client:
        session, first = await client.open(seed=7)
        results = [first]
        with pytest.raises(IllegalActionError):
            await session.step({"add": 0})
        for action in ACTIONS:
            results.append(await session.step(action))
        results.append(await session.state())
        await session.close()
        return results


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_an_episode_through_a_gateway_is_the_one_of_the_server_itself(wire):
    async with run_gateway(2) as (gateway, servers):
        by_gateway = {"grpc": gateway.grpc_address, "http": f"{gateway.http_address}/envs/{NAME}"}
        by_server = {"grpc": servers[0].grpc_address, "http": servers[0].http_address}
        through = await play_episode(by_gateway[wire])
        direct = await play_episode(by_server[wire])
        assert str(through) == str(direct)
        await wait_until(lambda: count_sessions(servers) == 0)


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_a_gateway_passes_on_whether_an_episode_succeeded(wire):
    async with run_gateway(factory=GoalEnv) as (gateway, _):
        address = {"grpc": gateway.grpc_address, "http": f"{gateway.http_address}/envs/{NAME}"}
        async with await AsyncEnvClient.connect(address[wire]) as client:
            for actions, success in ((WINNING_ACTIONS, True), (LOSING_ACTIONS, False)):
                session, first = await client.open(seed=7)
                results = [first, *[await session.step(action) for action in actions]]
                assert [item.success for item in results] == [*[None] * 5, success]
                assert (await session.reset(seed=8)).success is None


async def test_a_plain_websocket_client_plays_and_leaves_nothing_behind():
    async with run_gateway(2) as (gateway, servers):
        address = gateway.http_address.replace("http", "ws")
        async with websockets.connect(f"{address}/envs/{NAME}/ws") as socket:

            async def ask(kind: str, **data) -> dict:
                await socket.send(json.dumps({"type": kind, "data": data}))
                return json.loads(await socket.recv())

            first = await ask("reset", seed=7)
            assert first["type"] == "observation"
            assert first["data"]["observation"]["total"] == 0
            assert (await ask("step", add=2))["data"]["reward"] == 2.0
            assert (await ask("step", add=0))["data"]["code"] == "ILLEGAL_ACTION"
            assert count_sessions(servers) == 1
        await wait_until(lambda: count_sessions(servers) == 0)
        await wait_until(lambda: gateway.num_sessions == 0)


async def test_a_token_in_the_address_is_enough(monkeypatch):
    monkeypatch.setenv("LUDUS_GATEWAY_TOKEN", TOKEN)
    async with run_gateway() as (gateway, _):
        base = f"{gateway.http_address}/envs/{NAME}".replace("://", f"://me:{TOKEN}@")
        async with await AsyncEnvClient.connect(base) as client:
            session, _ = await client.open(seed=1)
            assert (await session.step({"add": 3})).reward == 3.0
        async with websockets.connect(f"{base.replace('http', 'ws')}/ws") as socket:
            await socket.send('{"type": "reset", "data": {}}')
            assert '"observation"' in str(await socket.recv())
        plain = await asyncio.to_thread(requests.get, f"{base}/metadata", timeout=60)
        assert plain.json()["name"] == NAME
        async with httpx.AsyncClient(timeout=60) as http:
            refused = await http.get(f"{gateway.http_address}/envs/{NAME}/metadata")
            assert refused.status_code == 401


async def test_a_group_is_together_on_one_server_and_begins_alike():
    async with run_gateway(2) as (gateway, servers), connect_client(gateway) as client:
        group = await client.open_group(6)
        firsts = {str(first.observation) for _, first in group}
        assert len(firsts) == 1
        loads = sorted(server.core.load.num_sessions for server in servers)
        assert loads == [0, 6]


async def test_two_environments_share_the_ports():
    item, other = make_server(), make_server()
    async with item, other, Gateway(two_environments(item, other)) as gateway:
        address = gateway.grpc_address
        async with (
            connect_client(f"{address}/other") as client,
            connect_client(f"{address}/one") as wrong,
        ):
            session, _ = await client.open(seed=1)
            assert (item.core.load.num_sessions, other.core.load.num_sessions) == (0, 1)
            stranger = await wrong.open_session()
            stranger.wire_session.session_id = session.id
            with pytest.raises(InvalidCallError, match="not to 'one'"):
                await stranger.reset(seed=1)
        with pytest.raises(InvalidCallError, match="one, other"):
            await AsyncEnvClient.connect(f"{address}/third", ConnectOptions(connect_timeout_s=60))


def two_environments(item, other):
    return make_config(
        environments={
            "one": {"kind": "static", "addresses": [item.grpc_address]},
            "other": {"kind": "static", "addresses": [other.grpc_address]},
        }
    )


async def test_environments_are_listed_over_http():
    async with run_gateway(2) as (gateway, _), http_client(gateway) as http:
        listed = (await http.get("/v1/envs")).json()["environments"]
        assert [(item["name"], item["num_servers"]) for item in listed] == [(NAME, 2)]
        shown = (await http.get(f"/v1/envs/{NAME}")).json()
        assert shown["environment"] == NAME and shown["action_schema"]["type"] == "object"


@pytest.mark.parametrize("path", ["/envs/nope/reset", "/v1/envs/nope"])
async def test_an_unknown_environment_is_a_typed_404_that_names_the_known_ones(path):
    async with run_gateway() as (gateway, _), httpx.AsyncClient(timeout=60) as http:
        method = "GET" if path.endswith("nope") else "POST"
        answer = await http.request(method, gateway.http_address + path, json={})
        assert answer.status_code == 404
        assert NAME in answer.json()["detail"]["message"]


async def test_no_request_is_answered_with_a_redirect():
    async with run_gateway() as (gateway, _), httpx.AsyncClient(timeout=60) as http:
        for path in (f"/envs/{NAME}/health/", f"/envs/{NAME}", "/v1/envs/", "/healthz/"):
            answer = await http.get(gateway.http_address + path)
            assert answer.status_code in (200, 404), path


async def test_metrics_exist_from_the_start_and_count_what_is_played():
    async with run_gateway() as (gateway, _), httpx.AsyncClient(timeout=60) as http:
        previous = (await http.get(f"{gateway.http_address}/metrics")).text
        assert f'ludus_gateway_sessions{{env="{NAME}",state="pending"}} 0.0' in previous
        async with await AsyncEnvClient.connect(gateway.grpc_address) as client:
            session, _ = await client.open(seed=1)
            await session.step({"add": 1})
            during = (await http.get(f"{gateway.http_address}/metrics")).text
            assert f'ludus_gateway_sessions{{env="{NAME}",state="active"}} 1.0' in during
            assert f'ludus_gateway_session_capacity{{env="{NAME}"}} 256.0' in during
            assert f'calls_total{{call="step",code="OK",env="{NAME}"}} 1.0' in during


async def test_calls_in_flight_on_many_sessions_do_not_wait_for_each_other():
    async with run_gateway(2) as (gateway, _), connect_client(gateway) as client:
        sessions = [(await client.open(seed=n))[0] for n in range(64)]
        for _ in range(3):
            results = await asyncio.gather(*(item.step({"add": 2}) for item in sessions))
            assert {result.reward for result in results} == {2.0}

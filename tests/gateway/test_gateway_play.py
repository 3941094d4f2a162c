"""Episodes played through a gateway over every wire."""

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
    make_config,
    make_http_client,
    make_server,
    run_gateway,
)

pytestmark = pytest.mark.asyncio

TOKEN = "token-of-the-whole-gateway"
ACTIONS = [{"add": 1}, {"add": 8}, {"add": 2}, {"add": 3}, {"add": 1}]


async def play_episode(address: str) -> list:
    async with await AsyncEnvClient.connect(address) as client:
        session, first_result = await client.open(seed=7)
        results = [first_result]
        with pytest.raises(IllegalActionError):
            await session.step({"add": 0})
        for action in ACTIONS:
            results.append(await session.step(action))
        results.append(await session.state())
        await session.close()
        return results


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_gateway_and_server_return_the_same_episode(wire):
    async with run_gateway(2) as (gateway, servers):
        gateway_addresses = {
            "grpc": gateway.grpc_address,
            "http": f"{gateway.http_address}/envs/{NAME}",
        }
        server_addresses = {"grpc": servers[0].grpc_address, "http": servers[0].http_address}
        gateway_results = await play_episode(gateway_addresses[wire])
        server_results = await play_episode(server_addresses[wire])
        assert str(gateway_results) == str(server_results)
        await wait_until(lambda: count_sessions(servers) == 0)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_gateway_forwards_episode_success(wire):
    async with run_gateway(factory=GoalEnv) as (gateway, _):
        addresses = {"grpc": gateway.grpc_address, "http": f"{gateway.http_address}/envs/{NAME}"}
        async with await AsyncEnvClient.connect(addresses[wire]) as client:
            for actions, success in ((WINNING_ACTIONS, True), (LOSING_ACTIONS, False)):
                session, first_result = await client.open(seed=7)
                results = [first_result, *[await session.step(action) for action in actions]]
                assert [result.success for result in results] == [*[None] * 5, success]
                assert (await session.reset(seed=8)).success is None


async def test_plain_websocket_client_plays_and_leaves_no_sessions():
    async with run_gateway(2) as (gateway, servers):
        address = gateway.http_address.replace("http", "ws")
        async with websockets.connect(f"{address}/envs/{NAME}/ws") as socket:

            async def call(kind: str, **fields) -> dict:
                await socket.send(json.dumps({"type": kind, "data": fields}))
                return json.loads(await socket.recv())

            reset_response = await call("reset", seed=7)
            assert reset_response["type"] == "observation"
            assert reset_response["data"]["observation"]["total"] == 0
            assert (await call("step", add=2))["data"]["reward"] == 2.0
            assert (await call("step", add=0))["data"]["code"] == "ILLEGAL_ACTION"
            assert count_sessions(servers) == 1
        await wait_until(lambda: count_sessions(servers) == 0)
        await wait_until(lambda: gateway.num_sessions == 0)


@pytest.mark.slow
async def test_token_in_the_address_authenticates(monkeypatch):
    monkeypatch.setenv("LUDUS_GATEWAY_TOKEN", TOKEN)
    async with run_gateway() as (gateway, _):
        base_url = f"{gateway.http_address}/envs/{NAME}".replace("://", f"://me:{TOKEN}@")
        async with await AsyncEnvClient.connect(base_url) as client:
            session, _ = await client.open(seed=1)
            assert (await session.step({"add": 3})).reward == 3.0
        async with websockets.connect(f"{base_url.replace('http', 'ws')}/ws") as socket:
            await socket.send('{"type": "reset", "data": {}}')
            assert '"observation"' in str(await socket.recv())
        response = await asyncio.to_thread(requests.get, f"{base_url}/metadata", timeout=60)
        assert response.json()["name"] == NAME
        async with httpx.AsyncClient(timeout=60) as http:
            refusal = await http.get(f"{gateway.http_address}/envs/{NAME}/metadata")
            assert refusal.status_code == 401


async def test_group_runs_on_one_server_with_equal_initial_observations():
    async with run_gateway(2) as (gateway, servers), connect_client(gateway) as client:
        group = await client.open_group(6)
        observations = {str(first_result.observation) for _, first_result in group}
        assert len(observations) == 1
        loads = sorted(server.core.load.num_sessions for server in servers)
        assert loads == [0, 6]


async def test_two_environments_share_the_ports():
    first_server, second_server = make_server(), make_server()
    async with (
        first_server,
        second_server,
        Gateway(make_two_environment_config(first_server, second_server)) as gateway,
    ):
        address = gateway.grpc_address
        async with (
            connect_client(f"{address}/other") as client,
            connect_client(f"{address}/one") as wrong_client,
        ):
            session, _ = await client.open(seed=1)
            assert (first_server.core.load.num_sessions, second_server.core.load.num_sessions) == (
                0,
                1,
            )
            foreign_session = await wrong_client.open_session()
            foreign_session.wire_session.session_id = session.id
            with pytest.raises(InvalidCallError, match="not to 'one'"):
                await foreign_session.reset(seed=1)
        with pytest.raises(InvalidCallError, match="one, other"):
            await AsyncEnvClient.connect(f"{address}/third", ConnectOptions(connect_timeout_s=60))


def make_two_environment_config(first_server, second_server):
    return make_config(
        environments={
            "one": {"kind": "static", "addresses": [first_server.grpc_address]},
            "other": {"kind": "static", "addresses": [second_server.grpc_address]},
        }
    )


@pytest.mark.slow
async def test_environments_are_listed_over_http():
    async with run_gateway(2) as (gateway, _), make_http_client(gateway) as http:
        environments = (await http.get("/v1/envs")).json()["environments"]
        assert [(entry["name"], entry["num_servers"]) for entry in environments] == [(NAME, 2)]
        environment = (await http.get(f"/v1/envs/{NAME}")).json()
        assert (
            environment["environment"] == NAME and environment["action_schema"]["type"] == "object"
        )


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/envs/nope/reset", "/v1/envs/nope"])
async def test_unknown_environment_returns_typed_404_with_known_names(path):
    async with run_gateway() as (gateway, _), httpx.AsyncClient(timeout=60) as http:
        method = "GET" if path.endswith("nope") else "POST"
        response = await http.request(method, gateway.http_address + path, json={})
        assert response.status_code == 404
        assert NAME in response.json()["detail"]["message"]


@pytest.mark.slow
async def test_paths_with_a_trailing_slash_are_not_redirected():
    async with run_gateway() as (gateway, _), httpx.AsyncClient(timeout=60) as http:
        for path in (f"/envs/{NAME}/health/", f"/envs/{NAME}", "/v1/envs/", "/healthz/"):
            response = await http.get(gateway.http_address + path)
            assert response.status_code in (200, 404), path


@pytest.mark.slow
async def test_metrics_exist_from_the_start_and_count_sessions_and_steps():
    async with run_gateway() as (gateway, _), httpx.AsyncClient(timeout=60) as http:
        initial_metrics = (await http.get(f"{gateway.http_address}/metrics")).text
        assert f'ludus_gateway_sessions{{env="{NAME}",state="pending"}} 0.0' in initial_metrics
        async with await AsyncEnvClient.connect(gateway.grpc_address) as client:
            session, _ = await client.open(seed=1)
            await session.step({"add": 1})
            current_metrics = (await http.get(f"{gateway.http_address}/metrics")).text
            assert f'ludus_gateway_sessions{{env="{NAME}",state="active"}} 1.0' in current_metrics
            assert f'ludus_gateway_session_capacity{{env="{NAME}"}} 256.0' in current_metrics
            assert f'calls_total{{call="step",code="OK",env="{NAME}"}} 1.0' in current_metrics


@pytest.mark.slow
async def test_concurrent_calls_of_many_sessions_do_not_block_each_other():
    async with run_gateway(2) as (gateway, _), connect_client(gateway) as client:
        sessions = [(await client.open(seed=n))[0] for n in range(64)]
        for _ in range(3):
            results = await asyncio.gather(*(session.step({"add": 2}) for session in sessions))
            assert {result.reward for result in results} == {2.0}

"""Clients of several gateways behind one address, one of which drains.

`FlakyProxy` is the address. Like a Kubernetes Service, it sends new connections to a gateway that
accepts sessions, and leaves existing connections on the draining gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from ludus.env.client import AsyncEnvClient
from ludus.proto.errors import UnavailableError
from ludus.services.gateway.gateway import Gateway
from tests.env.flaky_proxy import FlakyProxy
from tests.env.polling import wait_until
from tests.gateway.gateways import NAME, make_gateway, make_server

pytestmark = pytest.mark.slow

WIRES = ["grpc", "websocket"]
ACTION = {"add": 1}


@dataclass
class Deployment:
    """Two gateways with the same servers, and the address of both."""

    old_gateway: Gateway
    new_gateway: Gateway
    wire: str
    proxy: FlakyProxy

    @property
    def address(self) -> str:
        """Address of the environment for clients."""
        is_grpc = self.wire == "grpc"
        return f"{self.proxy.address}/{NAME}" if is_grpc else f"{self.proxy.address}/envs/{NAME}"

    def list_new_gateway_only(self) -> None:
        """Send new connections to the new gateway."""
        self.proxy.set_upstream(get_address(self.new_gateway, self.wire))

    def replace_gateway(self) -> None:
        """Remove the old gateway from the address, and drain it."""
        self.list_new_gateway_only()
        self.old_gateway.drain()


def get_address(gateway: Gateway, wire: str) -> str:
    return gateway.grpc_address if wire == "grpc" else gateway.http_address


@asynccontextmanager
async def deploy(wire: str) -> AsyncIterator[Deployment]:
    """Run two gateways behind one address, which forwards to the old gateway at first."""
    async with make_server() as server, make_gateway(server) as old, make_gateway(server) as new:
        await wait_until(lambda: all(is_open(gateway) for gateway in (old, new)))
        async with FlakyProxy(get_address(old, wire)) as proxy:
            yield Deployment(old, new, wire, proxy)


def is_open(gateway: Gateway) -> bool:
    return gateway.environments[NAME].environment_load.num_servers > 0


@pytest.mark.parametrize("wire", WIRES)
async def test_open_does_not_wait_for_the_end_of_a_drain(wire: str) -> None:
    async with (
        deploy(wire) as deployment,
        await AsyncEnvClient.connect(deployment.address) as client,
    ):
        old_session, _ = await client.open(seed=1)
        deployment.replace_gateway()
        new_session, _ = await client.open(seed=2)
        assert deployment.old_gateway.num_sessions == 1, "the drain has not ended"
        assert deployment.new_gateway.num_sessions == 1
        for session in (old_session, new_session):
            assert (await session.step(ACTION)).step_index == 1
        group = await client.open_group(2, seed=3)
        assert deployment.new_gateway.num_sessions == 3
        for session in (old_session, new_session, *(member for member, _ in group)):
            await session.close()
        await wait_until(lambda: deployment.old_gateway.num_sessions == 0)


@pytest.mark.parametrize("wire", WIRES)
async def test_thirty_players_outlive_the_end_of_a_draining_gateway(wire: str) -> None:
    async with deploy(wire) as deployment, asyncio.TaskGroup() as group:
        client = await AsyncEnvClient.connect(deployment.address)

        async def play(seed: int) -> None:
            for episode in range(6):
                session, _ = await client.open(seed=seed + episode)
                async with session:
                    for step_index in range(1, 4):
                        assert (await session.step(ACTION)).step_index == step_index
                        await asyncio.sleep(0.01)

        async with client:
            tasks = [group.create_task(play(seed)) for seed in range(30)]
            await wait_until(lambda: deployment.old_gateway.num_sessions >= 30)
            deployment.replace_gateway()
            await wait_until(lambda: deployment.old_gateway.num_sessions == 0)
            await deployment.old_gateway.stop()
            await asyncio.gather(*tasks)


async def test_all_opens_of_a_client_share_one_new_connection() -> None:
    async with (
        deploy("grpc") as deployment,
        await AsyncEnvClient.connect(deployment.address) as client,
    ):
        deployment.replace_gateway()
        await asyncio.gather(*(client.open(seed=seed) for seed in range(20)))
        assert deployment.new_gateway.num_sessions == 20
        assert deployment.proxy.num_connections == 2


async def test_connection_to_a_draining_gateway_closes_with_its_last_session() -> None:
    async with (
        deploy("grpc") as deployment,
        await AsyncEnvClient.connect(deployment.address) as client,
    ):
        old_sessions = [(await client.open(seed=seed))[0] for seed in range(2)]
        deployment.replace_gateway()
        await client.open(seed=2)
        tracked_sessions = deployment.old_gateway.environments[NAME].tracked_sessions
        assert tracked_sessions.num_connected_sessions == 2
        assert client.transport.num_connections == 2
        for session in old_sessions:
            await session.close()
        await wait_until(lambda: client.transport.num_connections == 1)


@pytest.mark.parametrize("wire", WIRES)
async def test_open_is_refused_after_a_few_attempts_if_every_gateway_drains(wire: str) -> None:
    async with (
        deploy(wire) as deployment,
        await AsyncEnvClient.connect(deployment.address) as client,
    ):
        num_earlier_connections = deployment.proxy.num_connections
        deployment.old_gateway.drain()
        with pytest.raises(UnavailableError, match="is draining") as error:
            await client.open(seed=1)
        assert error.value.code == "DRAINING"
        assert deployment.proxy.num_connections - num_earlier_connections <= 6


@pytest.mark.parametrize("wire", WIRES)
async def test_open_waits_for_a_gateway_that_accepts_sessions(wire: str) -> None:
    async with (
        deploy(wire) as deployment,
        await AsyncEnvClient.connect(deployment.address) as client,
    ):
        deployment.old_gateway.drain()
        open_task = asyncio.create_task(client.open(seed=1, wait_s=60.0))
        num_earlier_connections = deployment.proxy.num_connections
        await wait_until(lambda: deployment.proxy.num_connections > num_earlier_connections)
        deployment.list_new_gateway_only()
        await open_task
        assert deployment.new_gateway.num_sessions == 1


async def test_http_client_leaves_a_draining_gateway() -> None:
    async with deploy("http") as deployment:
        path = f"{deployment.proxy.address}/envs/{NAME}"
        async with httpx.AsyncClient(timeout=60) as http:
            first_reply = await http.post(f"{path}/reset", json={"seed": 1})
            assert "connection" not in first_reply.headers
            session_headers = {"x-session-id": first_reply.headers["x-session-id"]}
            deployment.replace_gateway()
            http.cookies.clear()  # the cookie would select the open session
            refusal = await http.post(f"{path}/reset", json={"seed": 2})
            assert (refusal.status_code, refusal.headers["connection"]) == (503, "close")
            assert refusal.json()["detail"]["code"] == "DRAINING"
            assert (await http.post(f"{path}/reset", json={"seed": 2})).status_code == 200
            step = await http.post(f"{path}/step", json={"action": ACTION}, headers=session_headers)
            assert step.status_code == 200

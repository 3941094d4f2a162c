"""`ludus env check --wait`: environments whose servers start when somebody wants a session."""

import asyncio

import pytest

from ludus.env.serving.loopback import PlayOptions, open_client
from ludus.proto.errors import NotFoundError
from ludus.services.gateway.gateway import Gateway
from tests.env.polling import eventually
from tests.gateway.gateways import (
    NAME,
    ListedServers,
    config_of,
    endpoint_of,
    env_server,
    num_sessions,
    sessions_of,
)


@pytest.mark.parametrize("was_there", [False, True])
async def test_who_waits_is_counted_as_demand_and_plays_when_a_server_has_started(was_there):
    async with env_server() as server:
        source = ListedServers(*[endpoint_of(server)] * was_there)
        async with Gateway(config_of("grpc://unused:1"), {NAME: source}) as gateway:
            admission = sessions_of(gateway).admission
            await eventually(lambda: bool(admission.fleet.description) == was_there)
            source.list()
            waiting = asyncio.create_task(describe(gateway.grpc_address, wait_s=60))
            await eventually(lambda: admission.num_waiting == 1)
            source.list(endpoint_of(server))
            assert (await waiting).server_id == "gateway"
            assert num_sessions([server]) == 0


async def test_who_waits_in_vain_is_told_for_how_long():
    source = ListedServers()
    async with Gateway(config_of("grpc://unused:1"), {NAME: source}) as gateway:
        with pytest.raises(NotFoundError, match=r"did not open a session within 0\.1 s"):
            await describe(gateway.grpc_address, wait_s=0.1)


async def describe(address: str, wait_s: float):
    async with open_client(address, PlayOptions(wait_s=wait_s)) as client:
        return await client.describe()

"""`ludus env check --wait` with environments that scale from zero."""

import asyncio

import pytest

from ludus.env.serving.loopback import PlayOptions, open_client
from ludus.proto.errors import NotFoundError
from ludus.services.gateway.gateway import Gateway
from tests.env.polling import wait_until
from tests.gateway.gateways import (
    NAME,
    ListedServers,
    count_sessions,
    get_sessions,
    make_config,
    make_endpoint,
    make_server,
)


@pytest.mark.parametrize("has_initial_server", [False, True])
async def test_waiting_requests_count_as_demand_and_succeed_once_a_server_starts(
    has_initial_server,
):
    async with make_server() as server:
        source = ListedServers(*[make_endpoint(server)] * has_initial_server)
        async with Gateway(make_config("grpc://unused:1"), {NAME: source}) as gateway:
            admission = get_sessions(gateway).admission
            await wait_until(lambda: bool(admission.fleet.description) == has_initial_server)
            source.list()
            describe_task = asyncio.create_task(describe(gateway.grpc_address, wait_s=60))
            await wait_until(lambda: admission.num_waiting == 1)
            source.list(make_endpoint(server))
            assert (await describe_task).server_id == "gateway"
            assert count_sessions([server]) == 0


async def test_timeout_error_contains_the_waiting_time():
    source = ListedServers()
    async with Gateway(make_config("grpc://unused:1"), {NAME: source}) as gateway:
        with pytest.raises(NotFoundError, match=r"did not open a session within 0\.1 s"):
            await describe(gateway.grpc_address, wait_s=0.1)


async def describe(address: str, wait_s: float):
    async with open_client(address, PlayOptions(wait_s=wait_s)) as client:
        return await client.describe()

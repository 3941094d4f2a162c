"""OpenEnv 0.1 servers are detected and used over HTTP; missing features raise clear errors."""

import asyncio

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions, EnvClient
from ludus.proto.errors import (
    CallTimeoutError,
    CapacityError,
    ConfigError,
    ExecutionError,
    InvalidCallError,
    SessionLostError,
    UnavailableError,
)
from tests.env.legacy_server import legacy_server
from tests.env.polling import advance_loop_clock, wait_until
from tests.env.served import reserve_port

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]


@pytest.fixture
def server():
    with legacy_server() as server:
        yield server


@pytest.fixture
async def client(server):
    async with await AsyncEnvClient.connect(server[0]) as client:
        yield client


async def test_client_detects_a_legacy_server_and_plays_an_episode(
    client: AsyncEnvClient, server
) -> None:
    assert client.transport.is_legacy
    assert (await client.describe()).max_sessions == 1
    session, result = await client.open()
    assert (result.observation, result.reward, result.step_index) == ({"total": 0}, None, 0)
    result = await session.step({"add": 3})
    assert (result.observation["total"], result.reward, result.step_index) == (3, 3.0, 1)
    result = await session.step({"add": 2})
    assert (result.observation["total"], result.step_index) == (5, 2)
    assert await session.state() == {"episode_id": "E", "step_count": 2, "total": 5}
    assert (await session.step({"add": 7})).terminated
    result = await session.reset()
    assert (result.observation["total"], result.step_index) == (0, 0)
    assert server[1].bodies[:2] == [{}, {"action": {"add": 3}}]


async def test_legacy_server_supports_only_one_session(client: AsyncEnvClient) -> None:
    session, _ = await client.open(close_when_done=True)
    with pytest.raises(CapacityError, match="supports only 1 session"):
        await client.open()
    await session.step({"add": 7})
    other_session, _ = await client.open()
    await other_session.close()
    [(new_session, _)] = await client.open_group(1)
    with pytest.raises(SessionLostError):
        await other_session.step({"add": 1})
    assert (await new_session.step({"add": 1})).observation["total"] == 1
    with pytest.raises(CapacityError, match="but 3 are needed"):
        await client.open_group(2)


async def test_features_ignored_by_legacy_servers_raise_errors(
    client: AsyncEnvClient, server
) -> None:
    with pytest.raises(ConfigError, match="would ignore the seed 7, because"):
        await client.open(seed=7)
    with pytest.raises(ConfigError, match="reset options game"):
        await client.open(options={"game": "catch"})
    with pytest.raises(ConfigError, match="linger_s"):
        await client.open(linger_s=5)
    with pytest.raises(ConfigError, match="ludus env check"):
        await client.open(resume=True)
    session, _ = await client.open()
    with pytest.raises(InvalidCallError, match="does not accept text"):
        await session.step(text="ADD 1")
    assert server[1].bodies == [{}]


async def test_option_allows_a_seed_that_the_server_ignores(server) -> None:
    connection = AsyncEnvClient.connect(server[0], ConnectOptions(allow_ignored_seed=True))
    async with await connection as client:
        await client.open(seed=7)
    assert server[1].bodies == [{"seed": 7}]


async def test_failed_step_is_an_execution_error_and_the_session_continues(
    client: AsyncEnvClient,
) -> None:
    session, _ = await client.open()
    with pytest.raises(ExecutionError, match="does not report which"):
        await session.step({"subtract": 1})
    assert (await session.step({"add": 2})).observation["total"] == 2


async def test_late_response_is_not_mistaken_for_the_next_response(server) -> None:
    address, counter = server
    async with await AsyncEnvClient.connect(address) as client:
        session, _ = await client.open()
        step_task = asyncio.create_task(session.step({"add": 98}))
        await wait_until(lambda: len(counter.bodies) == 2)
        advance_loop_clock(61)
        with pytest.raises(CallTimeoutError, match="within 60 s"):
            await step_task
        with pytest.raises(SessionLostError):
            await session.step({"add": 1})
        counter.may_step.set()
        new_session, first_result = await client.open()
        assert first_result.observation["total"] == 0
        assert (await new_session.step({"add": 1})).observation["total"] == 1


async def test_credentials_in_the_address_are_sent_but_not_shown_in_errors(server) -> None:
    address = server[0].replace("http://", "http://ann:hunter2@")
    async with await AsyncEnvClient.connect(address) as client:
        await client.open()
        assert server[1].headers[0]["authorization"] == "Basic YW5uOmh1bnRlcjI="
        with pytest.raises(CapacityError) as error_info:
            await client.open()
    assert "hunter2" not in str(error_info.value)


async def test_synchronous_client_plays_and_missing_server_is_unavailable() -> None:
    def play(address: str) -> None:
        with EnvClient.connect(address) as client:
            session, _ = client.open()
            assert session.step({"add": 1}).reward == 1.0

    with legacy_server() as (address, _):
        await asyncio.to_thread(play, address)
    with reserve_port() as port:
        address = f"http://127.0.0.1:{port}"
        with pytest.raises(UnavailableError, match=address):
            await AsyncEnvClient.connect(address, ConnectOptions(connect_timeout_s=0.2))

"""OpenEnv 0.1 servers: detected, used over HTTP, with clear errors for missing features."""

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
from tests.env.polling import move_loop_clock, wait_until
from tests.env.served import reserve_port

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]


@pytest.fixture
def legacy():
    with legacy_server() as running:
        yield running


@pytest.fixture
async def client(legacy):
    async with await AsyncEnvClient.connect(legacy[0]) as connected:
        yield connected


async def test_a_legacy_server_is_recognised_and_played(client: AsyncEnvClient, legacy) -> None:
    assert client.transport.is_legacy
    assert (await client.describe()).max_sessions == 1
    session, first = await client.open()
    assert (first.observation, first.reward, first.step_index) == ({"total": 0}, None, 0)
    second = await session.step({"add": 3})
    assert (second.observation["total"], second.reward, second.step_index) == (3, 3.0, 1)
    third = await session.step({"add": 2})
    assert (third.observation["total"], third.step_index) == (5, 2)
    assert await session.state() == {"episode_id": "E", "step_count": 2, "total": 5}
    assert (await session.step({"add": 7})).terminated
    again = await session.reset()
    assert (again.observation["total"], again.step_index) == (0, 0)
    assert legacy[1].bodies[:2] == [{}, {"action": {"add": 3}}]


async def test_a_legacy_server_has_room_for_one_session(client: AsyncEnvClient) -> None:
    session, _ = await client.open(close_when_done=True)
    with pytest.raises(CapacityError, match="supports only 1 session"):
        await client.open()
    await session.step({"add": 7})
    other, _ = await client.open()
    await other.close()
    [(member, _)] = await client.open_group(1)
    with pytest.raises(SessionLostError):
        await other.step({"add": 1})
    assert (await member.step({"add": 1})).observation["total"] == 1
    with pytest.raises(CapacityError, match="but 3 are needed"):
        await client.open_group(2)


async def test_what_a_legacy_server_would_ignore_is_refused(client: AsyncEnvClient, legacy) -> None:
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
    assert legacy[1].bodies == [{}]


async def test_an_ignored_seed_can_be_allowed(legacy) -> None:
    connecting = AsyncEnvClient.connect(legacy[0], ConnectOptions(allow_ignored_seed=True))
    async with await connecting as client:
        await client.open(seed=7)
    assert legacy[1].bodies == [{"seed": 7}]


async def test_a_fault_is_an_execution_error_and_the_session_continues(
    client: AsyncEnvClient,
) -> None:
    session, _ = await client.open()
    with pytest.raises(ExecutionError, match="does not report which"):
        await session.step({"subtract": 1})
    assert (await session.step({"add": 2})).observation["total"] == 2


async def test_a_late_answer_is_never_taken_for_the_next_one(legacy) -> None:
    address, counter = legacy
    async with await AsyncEnvClient.connect(address) as client:
        session, _ = await client.open()
        late = asyncio.create_task(session.step({"add": 98}))
        await wait_until(lambda: len(counter.bodies) == 2)
        move_loop_clock(61)
        with pytest.raises(CallTimeoutError, match="within 60 s"):
            await late
        with pytest.raises(SessionLostError):
            await session.step({"add": 1})
        counter.may_step.set()
        again, first = await client.open()
        assert first.observation["total"] == 0
        assert (await again.step({"add": 1})).observation["total"] == 1


async def test_credentials_in_the_address_travel_and_are_never_shown(legacy) -> None:
    address = legacy[0].replace("http://", "http://ann:hunter2@")
    async with await AsyncEnvClient.connect(address) as client:
        await client.open()
        assert legacy[1].headers[0]["authorization"] == "Basic YW5uOmh1bnRlcjI="
        with pytest.raises(CapacityError) as caught:
            await client.open()
    assert "hunter2" not in str(caught.value)


async def test_the_synchronous_client_and_a_server_that_is_gone() -> None:
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

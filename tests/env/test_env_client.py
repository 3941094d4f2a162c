"""The client behaves the same over every wire."""

import asyncio
import os
import warnings

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions, EnvClient
from ludus.proto.errors import (
    ActionParseError,
    AuthenticationError,
    CallTimeoutError,
    CapacityError,
    ConfigError,
    EpisodeStateError,
    ExecutionError,
    IllegalActionError,
    InvalidCallError,
    SessionLostError,
    UnavailableError,
)
from tests.env.counting_env import CountAction, CountingEnv, ThreadedCountingEnv
from tests.env.polling import advance_loop_clock, wait_for_sessions, wait_until
from tests.env.served import WIRES, reserve_port, serve, server_address

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=[CountingEnv, ThreadedCountingEnv])
def factory(request: pytest.FixtureRequest):
    return request.param


async def connect_client(server, wire: str, **options) -> AsyncEnvClient:
    return await AsyncEnvClient.connect(server_address(server, wire), ConnectOptions(**options))


async def play(client: AsyncEnvClient, seed: int) -> list:
    session, first_result = await client.open(seed=seed, close_when_done=True)
    results = [first_result]
    while not results[-1].done:
        results.append(await session.step({"add": 1 + len(results) % 3}))
    return results


async def test_results_and_state_of_an_episode_are_complete_on_every_wire(
    wire: str, factory
) -> None:
    async with serve(factory) as server, await connect_client(server, wire) as client:
        session, first_result = await client.open(seed=3, options={"start": 10, "note": "hi"})
        assert first_result.observation["total"] == 10
        assert first_result.observation["metadata"] == {"note": "hi"}
        assert (first_result.reward, first_result.done, first_result.step_index) == (None, False, 0)
        assert first_result.text.messages[0]["content"] == "Count to the end. Total 10."
        result = await session.step(CountAction(add=8))
        assert (result.reward, result.info, result.step_index) == (8.0, {"added": 8}, 1)
        assert result.tensors["trace"].tolist() == [0.0, 1.0, 2.0]
        result = await session.step(text="ADD 3")
        assert result.text.legal_answers == ["ADD 1", "ADD 2", "ADD 3"]
        assert await session.state() == {"episode_id": None, "step_count": 2, "total": 21}
        result = await session.step({"add": 7})
        assert (result.terminated, result.truncated, result.done) == (False, True, True)
        new_result = await session.reset(seed=3)
        assert new_result.observation["luck"] == first_result.observation["luck"]


@pytest.mark.slow
async def test_same_seed_and_actions_give_the_same_episode_on_every_wire(factory) -> None:
    async with serve(factory) as server:
        episodes = []
        for wire in WIRES:
            async with await connect_client(server, wire) as client:
                episodes.append(await asyncio.gather(*(play(client, seed) for seed in range(20))))
        assert episodes[0] == episodes[1]
        assert episodes[0][0] != episodes[0][1]


@pytest.mark.slow
async def test_server_errors_raise_the_same_exceptions_in_the_client(wire: str, factory) -> None:
    cases = [
        ({"add": "x"}, InvalidCallError),
        ({"add": 0}, IllegalActionError),
        ({"add": 13}, ExecutionError),
    ]
    async with serve(factory) as server, await connect_client(server, wire) as client:
        session = await client.open_session()
        with pytest.raises(EpisodeStateError):
            await session.step({"add": 1})
        await session.reset()
        for action, error in cases:
            with pytest.raises(error):
                await session.step(action)
        with pytest.raises(ActionParseError, match="'HIT'"):
            await session.step(text="HIT")
        assert (await session.step({"add": 1})).step_index == 1
        with pytest.raises(InvalidCallError, match="options colour"):
            await session.reset(options={"colour": "red"})


async def test_full_server_refuses_sessions_until_a_session_is_closed(wire: str) -> None:
    async with (
        serve(max_sessions=2) as server,
        await connect_client(server, wire) as client,
    ):
        first_session, _ = await client.open()
        await client.open()
        with pytest.raises(CapacityError, match="2/2"):
            await client.open()
        with pytest.raises(CapacityError, match="2/2"):
            await client.open_session()
        await first_session.close()
        await wait_for_sessions(server.core, 1)
        await client.open()
        with pytest.raises(SessionLostError, match="it was closed"):
            await first_session.step({"add": 1})


@pytest.mark.slow
async def test_a_session_frees_its_slot_when_its_episode_ends(wire: str) -> None:
    async with (
        serve(max_sessions=1) as server,
        await connect_client(server, wire) as client,
    ):
        for seed in range(3):
            await play(client, seed)
            await wait_for_sessions(server.core, 0)


@pytest.mark.slow
async def test_closing_a_client_closes_every_session(wire: str, factory) -> None:
    async with serve(factory) as server:
        async with await connect_client(server, wire) as client:
            await asyncio.gather(*(client.open() for _ in range(10)))
            assert server.core.load.num_sessions == 10
        await wait_for_sessions(server.core, 0)


@pytest.mark.slow
async def test_256_concurrent_sessions_play_complete_episodes(wire: str, factory) -> None:
    async with serve(factory) as server, await connect_client(server, wire) as client:
        episodes = await asyncio.gather(*(play(client, seed) for seed in range(256)))
        assert all(len(episode) == 6 and episode[-1].terminated for episode in episodes)


@pytest.mark.parametrize("seed", [-1, 2**64])
async def test_seed_outside_the_uint64_range_is_refused(wire: str, seed) -> None:
    async with serve() as server, await connect_client(server, wire) as client:
        with pytest.raises(InvalidCallError, match=f"got {seed}"):
            await client.open(seed=seed)
        await client.open(seed=2**64 - 1)


async def test_concurrent_calls_in_a_session_are_refused(wire: str) -> None:
    async with serve(ThreadedCountingEnv) as server, await connect_client(server, wire) as client:
        session, _ = await client.open()
        results = await asyncio.gather(
            session.step({"add": 1}), session.step({"add": 2}), return_exceptions=True
        )
        assert results[0].step_index == 1
        assert isinstance(results[1], EpisodeStateError)


async def test_late_reply_is_never_matched_to_a_later_call(wire: str, gate) -> None:
    async with serve(gate.factory) as server, await connect_client(server, wire) as client:
        session, _ = await client.open()
        other_session, _ = await client.open()
        step_task = asyncio.create_task(session.step({"add": 98}))
        await wait_until(lambda: gate.num_entered)
        advance_loop_clock(61)
        with pytest.raises(CallTimeoutError, match="within 60 s"):
            await step_task
        with pytest.raises(SessionLostError):
            await session.step({"add": 1})
        gate.open()
        assert (await other_session.step({"add": 2})).observation["total"] == 2
        await wait_for_sessions(server.core, 1)


async def test_a_cancelled_call_drops_its_session(wire: str) -> None:
    async with serve(ThreadedCountingEnv) as server, await connect_client(server, wire) as client:
        session, _ = await client.open()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.step({"add": 99}), 0.05)
        with pytest.raises(SessionLostError, match="cancelled"):
            await session.step({"add": 1})
        await wait_for_sessions(server.core, 0)


async def test_idle_session_is_lost_with_the_idle_time_as_reason(wire: str, core_clock) -> None:
    async with (
        serve(idle_timeout_s=60) as server,
        await connect_client(server, wire) as client,
    ):
        session, _ = await client.open()
        core_clock.advance(60)
        await wait_for_sessions(server.core, 0)
        with pytest.raises(SessionLostError, match="idle for 60 s"):
            await session.step({"add": 1})
        await client.open()


async def test_describe_returns_the_description_of_the_server(wire: str) -> None:
    async with serve() as server, await connect_client(server, wire) as client:
        description = await client.describe()
        assert description == server.core.description
        assert description.options == {"num_steps": 5}
        assert description.has_text_view
        assert "add" in description.action_schema["properties"]


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_connecting_without_the_correct_token_fails(wire: str, token) -> None:
    async with serve(token="secret") as server:
        with pytest.raises(AuthenticationError, match="token"):
            await connect_client(server, wire, token=token)
        async with await connect_client(server, wire, token="secret") as client:
            assert (await client.describe()).name == "counting"
            assert len(await play(client, 1)) == 6


async def test_connecting_to_an_unused_port_raises_unavailable_error(wire: str) -> None:
    with reserve_port() as port:
        address = f"{wire}://127.0.0.1:{port}"
        with pytest.raises(UnavailableError, match=address):
            await AsyncEnvClient.connect(address, ConnectOptions(connect_timeout_s=0.3))


async def test_address_without_a_known_scheme_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="'localhost:8000'"):
        await AsyncEnvClient.connect("localhost:8000")


async def test_sync_client_and_async_client_play_the_same_episode(wire: str) -> None:
    def play_synchronously(address: str) -> list:
        with EnvClient.connect(address) as client:
            assert client.describe().name == "counting"
            session, first_result = client.open(seed=5)
            results = [first_result]
            while not results[-1].done:
                results.append(session.step({"add": 1 + len(results) % 3}))
            session.close()
            other_session = client.open_session()
            assert other_session.reset(seed=5) == first_result
            assert other_session.step(text="ADD 2").observation == results[1].observation
            assert other_session.state()["total"] == 2
            with pytest.raises(IllegalActionError):
                other_session.step({"add": 0})
            return results

    async with serve() as server, await connect_client(server, wire) as client:
        results = await asyncio.to_thread(play_synchronously, server_address(server, wire))
        assert results == await play(client, 5)


def call_in_fork(call) -> str:
    """Return the message of the error that `call` raises in a forked process."""
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns about forks of several threads
        pid = os.fork()
    if pid == 0:
        try:
            call()
        except InvalidCallError as error:
            os.write(write_fd, error.message.encode())
        except BaseException as error:  # noqa: BLE001 - pytest must not run in the child
            os.write(write_fd, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    with os.fdopen(read_fd) as pipe:
        return pipe.read()


async def test_a_forked_process_cannot_use_a_client_and_does_not_close_it(wire: str) -> None:
    def play_and_fork(address: str) -> None:
        with EnvClient.connect(address, ConnectOptions(timeout_s=3)) as client:
            session, _ = client.open(seed=1)
            for call in (lambda: session.step({"add": 1}), client.describe, client.open):
                assert "connect a new client in the forked process" in call_in_fork(call)
            for close in (session.close, client.close):
                assert call_in_fork(close) == ""
            assert session.step({"add": 1}).step_index == 1

    async with serve() as server:
        await asyncio.to_thread(play_and_fork, server_address(server, wire))

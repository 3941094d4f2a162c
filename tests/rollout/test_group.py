"""Tests of groups on a real server: open calls, time limits, replays and closed sessions."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.trainer.core.types import GroupSpec, RolloutStatus, SampledCompletion, Sampling
from ludus.trainer.data.mixture import derive_group_seeds
from ludus.trainer.models.chat import ChatTokenizer
from openspiel_env import make_environment
from tests.env.counting_env import GloballyRandomEnv
from tests.rollout.scripted_policy import LIMITS, ScriptedPlayer, make_player, make_runner

OPENING_MODES = pytest.mark.parametrize("max_sessions", [256, 0], ids=["together", "one by one"])


def make_blackjack_server(max_sessions: int) -> EnvServer:
    """Return a blackjack server without starting it."""
    options = ServerOptions(port=0, max_sessions=max_sessions)
    return EnvServer(lambda: make_environment(game="blackjack"), options)


class CountingClient:
    """A client that records its open calls and session ids."""

    def __init__(self, client: AsyncEnvClient) -> None:
        self._client = client
        self.group_sizes: list[int] = []
        self.num_opens = 0
        self.session_ids: list[str] = []

    async def open(self, **arguments):
        self.num_opens += 1
        session, first_result = await self._client.open(**arguments)
        self.session_ids.append(session.id)
        return session, first_result

    async def open_group(self, size: int, **arguments):
        self.group_sizes.append(size)
        sessions = await self._client.open_group(size, **arguments)
        self.session_ids += [session.id for session, _ in sessions]
        return sessions


@OPENING_MODES
async def test_equal_seeds_and_completions_give_equal_episodes(
    client: AsyncEnvClient, chat: ChatTokenizer, max_sessions: int
) -> None:
    player, _ = make_player(client, chat, itertools.repeat("HIT"), max_sessions=max_sessions)
    group = await player.play_group(GroupSpec(0, "game", (11,) * 8))
    assert len({(tuple(r.sequences[0].token_ids), r.reward, r.status) for r in group.rollouts}) == 1
    assert [rollout.seed for rollout in group.rollouts] == [11] * 8


@pytest.mark.parametrize(
    ("seeds", "max_sessions", "sizes", "num_opens"),
    [
        ((5, 5, 5), 3, [3], 0),
        ((5, 5, 5), 2, [], 3),
        ((5, 5, 5), 0, [], 3),
        ((5, 6, 7), 256, [], 3),
    ],
    ids=["fits", "does not fit", "unknown capacity", "different seeds"],
)
async def test_group_with_equal_seeds_is_opened_in_one_call_if_it_fits(
    client: AsyncEnvClient,
    chat: ChatTokenizer,
    seeds: tuple[int, ...],
    max_sessions: int,
    sizes: list[int],
    num_opens: int,
) -> None:
    counting_client = CountingClient(client)
    player, _ = make_player(
        counting_client, chat, itertools.repeat("STAND"), max_sessions=max_sessions
    )
    group = await player.play_group(GroupSpec(0, "game", seeds))
    assert (counting_client.group_sizes, counting_client.num_opens) == (sizes, num_opens)
    assert [rollout.seed for rollout in group.rollouts] == list(seeds)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.TERMINATED}


@pytest.mark.slow
async def test_groups_wait_while_the_server_is_full(chat: ChatTokenizer) -> None:
    async with (
        make_blackjack_server(max_sessions=3) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        player, _ = make_player(client, chat, itertools.repeat("STAND"), max_sessions=3)
        shared_specs = [GroupSpec(index, "game", (index,) * 2) for index in range(6)]
        independent_spec = GroupSpec(6, "game", tuple(range(12)))
        groups = await asyncio.gather(
            *(player.play_group(spec) for spec in [*shared_specs, independent_spec])
        )
    statuses = {rollout.status for group in groups for rollout in group.rollouts}
    assert statuses == {RolloutStatus.TERMINATED}


@pytest.mark.slow
async def test_group_with_different_first_observations_fails(chat: ChatTokenizer) -> None:
    async with (
        EnvServer(GloballyRandomEnv, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        player, policy = make_player(client, chat, itertools.repeat("ADD 1"), max_sessions=256)
        group = await player.play_group(GroupSpec(0, "game", (4,) * 4))
        assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.FAILED}
        assert "seed 4" in group.rollouts[0].failure
        assert policy.prompts == []
        await wait_for_sessions(server)


@pytest.mark.slow
@OPENING_MODES
async def test_group_of_a_stopped_server_is_lost(chat: ChatTokenizer, max_sessions: int) -> None:
    server = make_blackjack_server(max_sessions=256)
    await server.start()
    async with await AsyncEnvClient.connect(
        server.grpc_address, ConnectOptions(reconnect_timeout_s=0.2)
    ) as client:
        player, _ = make_player(client, chat, itertools.repeat("HIT"), max_sessions=max_sessions)
        await server.stop()
        group = await player.play_group(GroupSpec(3, "game", (1,) * 4))
    assert [(r.seed, r.status, r.reward) for r in group.rollouts] == [
        (1, RolloutStatus.LOST, None)
    ] * 4


async def hang(prompt_ids: list[int], sampling: Sampling, seed: int) -> SampledCompletion:
    """Wait forever, like a policy that does not respond."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@OPENING_MODES
async def test_group_timeout_makes_the_group_lost_and_closes_sessions(
    server: EnvServer, client: AsyncEnvClient, chat: ChatTokenizer, max_sessions: int
) -> None:
    player = ScriptedPlayer(make_runner(client, chat, hang, LIMITS, max_sessions=max_sessions))
    group = await player.play_group(GroupSpec(7, "game", (1, 1)), timeout_s=0.2)
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.LOST] * 2
    assert "rollout.group_timeout_s" in group.rollouts[0].failure
    assert group.index == 7
    await wait_for_sessions(server)


async def test_evaluation_timeout_makes_the_episode_lost_and_closes_sessions(
    server: EnvServer, client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    player = ScriptedPlayer(make_runner(client, chat, hang))
    rollout = await player.play_episode(5, timeout_s=0.2)
    assert (rollout.seed, rollout.status, rollout.reward) == (5, RolloutStatus.LOST, None)
    assert "rollout.group_timeout_s = 0.2" in rollout.failure
    await wait_for_sessions(server)


async def test_group_without_free_sessions_is_lost_at_the_time_limit(
    chat: ChatTokenizer,
) -> None:
    async with (
        make_blackjack_server(max_sessions=3) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        await client.open()
        player, _ = make_player(client, chat, itertools.repeat("HIT"), max_sessions=3)
        group = await player.play_group(GroupSpec(0, "game", (1,) * 3), timeout_s=0.3)
        assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.LOST] * 3
        await wait_for_sessions(server, 1)


@OPENING_MODES
@pytest.mark.parametrize("replays_lost_episodes", [True, False])
async def test_lost_episodes_are_replayed_if_configured(
    chat: ChatTokenizer, max_sessions: int, replays_lost_episodes: bool
) -> None:
    options = ServerOptions(port=0, max_sessions=8, check_determinism=True)
    async with (
        EnvServer(lambda: make_environment(game="blackjack"), options) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        counting_client = CountingClient(client)
        player, policy = make_player(
            counting_client,
            chat,
            itertools.repeat("STAND"),
            max_sessions=max_sessions,
            replays_lost_episodes=replays_lost_episodes,
        )

        async def close_sessions_and_generate(
            prompt_ids: list[int], sampling: Sampling, seed: int
        ) -> SampledCompletion:
            while counting_client.session_ids:
                await server.core.close(counting_client.session_ids.pop())
            return await policy(prompt_ids, sampling, seed)

        spec = GroupSpec(0, "game", (11,) * 2)
        player_with_losses = player.replace_fields(generate=close_sessions_and_generate)
        group = await player_with_losses.play_group(spec)
        status = RolloutStatus.TERMINATED if replays_lost_episodes else RolloutStatus.LOST
        assert [rollout.status for rollout in group.rollouts] == [status] * 2
        if replays_lost_episodes:
            assert group == await player.play_group(spec)


@pytest.mark.slow
@OPENING_MODES
async def test_cancelled_group_leaves_no_session(
    server: EnvServer, client: AsyncEnvClient, chat: ChatTokenizer, max_sessions: int
) -> None:
    player = ScriptedPlayer(make_runner(client, chat, hang, LIMITS, max_sessions=max_sessions))
    for num_loop_iterations in range(40):
        task = asyncio.create_task(player.play_group(GroupSpec(0, "game", (1,) * 4)))
        for _ in range(num_loop_iterations):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await wait_for_sessions(server)


async def wait_for_sessions(server: EnvServer, num_sessions: int = 0) -> None:
    """Wait until two checks in a row find `num_sessions` sessions on the server.

    One check is not enough, because a cancelled call may still open a session for a moment.
    """
    for _ in range(1200):
        is_equal = server.core.load.num_sessions == num_sessions
        await asyncio.sleep(0.05)
        if is_equal and server.core.load.num_sessions == num_sessions:
            return
    raise AssertionError(f"expected {num_sessions} sessions, got {server.core.load}")


@pytest.mark.slow
async def test_sampling_seeds_differ_between_episodes_and_repeat_in_replays(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    async def play_seeds(index: int) -> list[int]:
        player, policy = make_player(client, chat, itertools.repeat("STAND"), max_sessions=256)
        await player.play_group(GroupSpec(index, "game", (11,) * 8))
        return sorted(policy.seeds)

    first_seeds = await play_seeds(3)
    assert len(set(first_seeds)) == 8
    assert await play_seeds(3) == first_seeds
    assert set(await play_seeds(4)).isdisjoint(first_seeds)


@pytest.mark.slow
def test_group_seeds_are_distinct_and_below_two_to_the_30() -> None:
    shared_seeds = [derive_group_seeds(3, index, 16, shared=True) for index in range(2000)]
    independent_seeds = [derive_group_seeds(3, index, 16, shared=False) for index in range(100)]
    assert all(len(set(seeds)) == 1 for seeds in shared_seeds)
    assert len({seeds[0] for seeds in shared_seeds}) == 2000
    assert len({seed for seeds in independent_seeds for seed in seeds}) == 1600
    assert max(seed for seeds in shared_seeds + independent_seeds for seed in seeds) < 2**30
    assert derive_group_seeds(3, 5, 4, shared=True) != derive_group_seeds(4, 5, 4, shared=True)

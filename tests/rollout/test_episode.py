"""Tests of episodes on a real server: sampled tokens, masks, rewards and void episodes."""

from __future__ import annotations

import itertools

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import RewardTerm
from ludus.trainer.core.types import GroupSpec, Rollout, RolloutStatus, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.adapters.environment_adapter import ImportedRenderer
from ludus.trainer.rollout.rewards.scoring import Reward
from openspiel_env import make_environment
from tests.env.counting_env import CountingEnv
from tests.env.goal_env import GoalEnv
from tests.rollout.reward_functions import play_in_pairs, play_without_end
from tests.rollout.scripted_policy import (
    LIMITS,
    ScriptedPlayer,
    ScriptedPolicy,
    make_player,
    make_runner,
)

FUNCTIONS = "tests.rollout.reward_functions"


async def play_until_two_turns(client: AsyncEnvClient, chat: ChatTokenizer) -> Rollout:
    """Return the rollout of the first seed with two turns: a hit without a bust, and a stand."""
    for seed in range(100):
        player, _ = make_player(client, chat, iter(["HIT", "STAND"]))
        rollout = await player.play_episode(seed)
        if len(rollout.turns) == 2:
            return rollout
    raise AssertionError("no seed below 100 has an episode with two turns")


async def test_loss_mask_contains_exactly_the_sampled_tokens(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    rollout = await play_until_two_turns(client, chat)
    [sequence] = rollout.sequences
    pairs = zip(sequence.token_ids, sequence.loss_mask, strict=True)
    sampled_ids = [token for token, is_sampled in pairs if is_sampled]
    assert sampled_ids == chat.encode_completion("HIT") + chat.encode_completion("STAND")
    logprobs = zip(sequence.logprobs, sequence.loss_mask, strict=True)
    assert [logprob for logprob, is_sampled in logprobs if is_sampled] == [-1.0] * 4
    assert not sequence.loss_mask[0], "the first token has no log-prob, but is in the mask"


@pytest.mark.slow
async def test_every_prompt_is_an_exact_prefix_of_the_next(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    for seed in range(20):
        player, policy = make_player(client, chat, itertools.repeat("HIT"))
        rollout = await player.play_episode(seed)
        for prompt in policy.prompts:
            assert rollout.sequences[0].token_ids[: len(prompt)].tolist() == prompt


async def test_text_without_action_ends_with_the_invalid_action_reward(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    limits = LIMITS.model_copy(update={"invalid_action_reward": -0.7})
    player, _ = make_player(client, chat, iter(["I would rather not"]), limits)
    rollout = await player.play_episode(1)
    assert (rollout.status, rollout.reward) == (RolloutStatus.INVALID_ACTION, -0.7)


@pytest.mark.slow
async def test_turn_limit_truncates_the_episode_and_closes_the_session(
    server: EnvServer, client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    limits = LIMITS.model_copy(update={"max_turns": 1})
    statuses = set()
    for seed in range(20):
        player, _ = make_player(client, chat, iter(["HIT"]), limits)
        statuses.add((await player.play_episode(seed)).status)
    assert statuses == {RolloutStatus.TRUNCATED, RolloutStatus.TERMINATED}
    assert server.core.load.num_sessions == 0


@pytest.mark.slow
async def test_truncated_episode_includes_the_last_observation(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    limits = LIMITS.model_copy(update={"max_turns": 1})
    for seed in range(20):
        player, _ = make_player(client, chat, iter(["HIT"]), limits)
        truncated_rollout = await player.play_episode(seed)
        player, policy = make_player(client, chat, itertools.repeat("HIT"))
        full_rollout = await player.play_episode(seed)
        [sequence] = truncated_rollout.sequences
        if truncated_rollout.status is RolloutStatus.TERMINATED:
            assert sequence.loss_mask[-1], "tokens follow the end of the episode"
            continue
        assert sequence.token_ids.tolist() == policy.prompts[1]
        assert sequence.turns == full_rollout.sequences[0].turns[:1]


async def test_rollout_contains_the_success_from_the_environment(chat: ChatTokenizer) -> None:
    async with (
        EnvServer(GoalEnv, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        successes = {}
        for name, script in {
            "goal reached": ["ADD 2"] * 5,
            "goal missed": ["ADD 1"] * 5,
            "truncated by environment": ["ADD 7"],
            "invalid": ["ADD 2", "no"],
            "truncated by turn limit": ["ADD 2"] * 4,
        }.items():
            limits = LIMITS.model_copy(update={"max_turns": len(script)})
            player, _ = make_player(client, chat, iter(script), limits)
            successes[name] = (await player.play_episode(3)).success
    assert successes == {
        "goal reached": True,
        "goal missed": False,
        "truncated by environment": False,
        "invalid": None,
        "truncated by turn limit": None,
    }


async def test_rollout_function_preserves_the_success_of_the_environment(
    chat: ChatTokenizer,
) -> None:
    async with (
        EnvServer(GoalEnv, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        script = iter(["seven is too much", "ADD 7"])
        player, _ = make_player(client, chat, script, function=play_in_pairs)
        assert (await player.play_episode(3)).success is False


async def test_episode_truncated_by_the_environment_includes_last_observation(
    chat: ChatTokenizer,
) -> None:
    async with (
        EnvServer(CountingEnv, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        player, _ = make_player(client, chat, iter(["ADD 1", "ADD 7"]))
        rollout = await player.play_episode(3)
    [sequence] = rollout.sequences
    assert (rollout.status, rollout.reward) == (RolloutStatus.TRUNCATED, 8.0)
    assert [turn.reward for turn in sequence.turns] == [1.0, 7.0]
    last_ids = sequence.token_ids[sequence.turns[-1].end :]
    assert chat.tokenizer.decode(last_ids, skip_special_tokens=True) == "Total 8."


async def test_reasoning_is_not_part_of_the_action(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    script = itertools.repeat("<think>HIT is better</think>STAND")
    limits = LIMITS.model_copy(update={"max_completion_tokens": 64, "max_tokens": 512})
    for seed in range(5):
        player, _ = make_player(client, chat, script, limits)
        rollout = await player.play_episode(seed)
        assert (rollout.status, len(rollout.turns)) == (RolloutStatus.TERMINATED, 1)


async def test_only_a_replayed_episode_repeats_the_sampling_seeds(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    async def play_seeds(seed: int, environment_index: int, run_seed: int) -> tuple[int, ...]:
        player, policy = make_player(
            client,
            chat,
            itertools.repeat("HIT"),
            run_seed=run_seed,
            environment_index=environment_index,
        )
        await player.play_episode(seed)
        return tuple(policy.seeds)

    seeds_by_case = [
        await play_seeds(*case) for case in [(3, 0, 0), (3, 1, 0), (4, 0, 0), (3, 0, 1)]
    ]
    assert len({seeds[0] for seeds in seeds_by_case}) == 4, (
        "different cases have the same sampling seeds"
    )
    assert await play_seeds(3, 1, 0) == seeds_by_case[1]


async def test_rollout_function_replaces_the_loop_and_adds_fields(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    script = itertools.cycle(["a poor hand", "STAND"])
    reward = Reward([RewardTerm(), RewardTerm(function=f"{FUNCTIONS}:count_thoughts", weight=10)])
    player, policy = make_player(client, chat, script, function=play_in_pairs, reward=reward)
    group = await player.play_group(GroupSpec(0, "game", (4,)))
    [rollout] = group.rollouts
    assert rollout.status is RolloutStatus.TERMINATED
    assert rollout.episode_return is not None
    assert rollout.reward == rollout.episode_return + 10
    assert [turn.reward for turn in rollout.turns] == [0.0, rollout.episode_return]
    assert "And now your move." in chat.decode(policy.prompts[1])


async def test_rollout_function_has_limits_and_invalid_action_penalty(
    server: EnvServer, client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    script = iter(["a poor hand", "GIVE UP"])
    player, _ = make_player(client, chat, script, function=play_in_pairs)
    rollout = await player.play_episode(4)
    assert (rollout.status, rollout.reward) == (RolloutStatus.INVALID_ACTION, -1.0)
    limits = LIMITS.model_copy(update={"max_turns": 1})
    player, _ = make_player(client, chat, iter(["a poor hand"]), limits, function=play_in_pairs)
    assert (await player.play_episode(4)).status is RolloutStatus.TRUNCATED
    player, _ = make_player(client, chat, iter([]), function=play_without_end)
    void_rollout = await player.play_episode(4)
    assert void_rollout.status is RolloutStatus.FAILED
    assert "environment 'game': the rollout function must return EpisodeEnd" in void_rollout.failure
    assert server.core.load.num_sessions == 0


async def test_incomplete_completion_is_followed_by_an_unsampled_end_token(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    for seed in range(100):
        player, _ = make_player(client, chat, iter(["HIT...", "STAND"]))
        rollout = await player.play_episode(seed)
        if len(rollout.turns) == 2:
            break
    [sequence] = rollout.sequences
    end_index = sequence.token_ids.tolist().index(chat.end_token_id, sequence.turns[0].start)
    assert not sequence.loss_mask[end_index]


@pytest.mark.slow
async def test_episode_of_a_stopped_server_is_lost_without_reward(chat: ChatTokenizer) -> None:
    server = EnvServer(lambda: make_environment(game="blackjack"), ServerOptions(port=0))
    await server.start()
    async with await AsyncEnvClient.connect(
        server.grpc_address, ConnectOptions(reconnect_timeout_s=0.2)
    ) as client:
        player, policy = make_player(client, chat, itertools.repeat("HIT"))
        generate = policy.__call__

        async def stop_server_and_generate(prompt_ids: list[int], sampling: Sampling, seed: int):
            await server.stop()
            return await generate(prompt_ids, sampling, seed)

        player = ScriptedPlayer(make_runner(client, chat, stop_server_and_generate, LIMITS))
        lost_rollout = await player.play_episode(1)
        unopened_rollout = await player.play_episode(2)
    for rollout in (lost_rollout, unopened_rollout):
        assert (rollout.status, rollout.reward) == (RolloutStatus.LOST, None)
        assert rollout.failure


async def test_configured_render_and_parse_replace_the_renderer(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    renderer = ImportedRenderer(
        "tests.rollout.test_episode:render", "tests.rollout.test_episode:parse", "game"
    )
    policy = ScriptedPolicy(chat, iter(["1"]))
    rollout = await ScriptedPlayer(
        make_runner(client, chat, policy, renderer=renderer)
    ).play_episode(5)
    assert rollout.status is RolloutStatus.TERMINATED
    assert "legal: [0, 1]" in chat.decode(policy.prompts[0])


def render(observation: dict[str, object], first: bool) -> list[dict[str, str]]:
    """Return one message with the legal actions."""
    return [{"role": "user", "content": f"legal: {observation['legal_actions']}"}]


def parse(text: str, observation: dict[str, object]) -> dict[str, int]:
    """Return the action with the number in the text."""
    return {"action_id": int(text)}

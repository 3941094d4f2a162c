"""Episodes that a limit cut off are trained on, masked or penalised: `rollout.overlong`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import GrpoConfig, RewardTerm
from ludus.trainer.core.types import GroupSpec, Rollout, RolloutGroup
from ludus.trainer.data.batch import make_batch
from ludus.trainer.data.counts import count_group
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.overlong import compute_length_penalty
from ludus.trainer.rollout.rewards.scoring import Reward
from tests.data.rollouts import make_group
from tests.env.counting_env import NUM_STEPS, CountingEnv
from tests.rollout.scripted_policy import LIMITS, make_player

SCRIPTS = {
    "ended": ["ADD 1"] * NUM_STEPS,
    "truncated by the environment": ["ADD 7"],
    "a completion was cut": ["ADD 1..."] + ["ADD 1"] * (NUM_STEPS - 1),
    "no turn was left": ["ADD 1"] * (NUM_STEPS - 1),
}
OVERLONG = {"a completion was cut", "no turn was left"}
RETURNS = {"ended": 5.0, "truncated by the environment": 7.0, "a completion was cut": 5.0}
RETURNS |= {"no turn was left": 4.0}


async def play(
    chat: ChatTokenizer, overlong: str, *, max_tokens: int = 100, reward: Reward | None = None
) -> dict[str, Rollout]:
    """Return an episode for each script, with completions far shorter than `max_tokens`."""
    rollouts = {}
    async with (
        EnvServer(CountingEnv, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        for name, script in SCRIPTS.items():
            limits = LIMITS.model_copy(
                update={
                    "overlong": overlong,
                    "max_turns": len(script),
                    "max_completion_tokens": max_tokens,
                    "max_tokens": 2000,
                }
            )
            player, _ = make_player(client, chat, iter(script), limits, reward=reward)
            group = await player.play_group(GroupSpec(0, "counting", (3,)))
            [rollouts[name]] = group.rollouts
    return rollouts


async def test_overlong_episodes_are_trained_on_by_default(chat: ChatTokenizer) -> None:
    for name, rollout in (await play(chat, "train")).items():
        assert (rollout.reward, rollout.is_masked) == (RETURNS[name], False)
        assert rollout.length_penalty is None


async def test_overlong_episodes_are_masked(chat: ChatTokenizer) -> None:
    rollouts = await play(chat, "mask")
    assert {name for name, rollout in rollouts.items() if rollout.is_masked} == OVERLONG
    assert {name: rollout.reward for name, rollout in rollouts.items()} == RETURNS


async def test_overlong_episodes_are_penalised_within_their_reward(chat: ChatTokenizer) -> None:
    rollouts = await play(chat, "penalise")
    for name, rollout in rollouts.items():
        penalty = -1.0 if name in OVERLONG else 0.0
        assert rollout.reward == RETURNS[name] + penalty
        assert rollout.episode_return == RETURNS[name], "the penalty is no part of the return"
        assert [(term.name, term.value) for term in rollout.terms] == [
            ("environment", RETURNS[name]),
            ("length_penalty", penalty),
        ]


async def test_long_completion_is_penalised_before_it_is_cut(chat: ChatTokenizer) -> None:
    num_tokens = len(chat.encode_completion("ADD 1"))
    rollouts = await play(chat, "penalise", max_tokens=num_tokens)
    assert rollouts["ended"].length_penalty == -1.0


async def test_penalty_is_added_to_rewards_of_functions(chat: ChatTokenizer) -> None:
    term = RewardTerm(function="tests.rollout.reward_functions:count_words", weight=0.5)
    rollouts = await play(chat, "penalise", reward=Reward([term]))
    ended, cut = rollouts["ended"], rollouts["a completion was cut"]
    assert ended.reward == 0.5 * NUM_STEPS * len(["ADD", "1"])
    assert cut.reward == ended.reward - 1


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0), (800, 0), (850, -0.25), (900, -0.5), (1000, -1), (2000, -1)]
)
def test_penalty_falls_over_the_last_fifth(num_tokens: int, penalty: float) -> None:
    assert compute_length_penalty(num_tokens, 1000) == pytest.approx(penalty)


def mask(group: RolloutGroup, *indices: int) -> RolloutGroup:
    """Return the group with these episodes masked."""
    rollouts = [
        replace(rollout, is_masked=index in indices) for index, rollout in enumerate(group.rollouts)
    ]
    return replace(group, rollouts=tuple(rollouts))


def test_masked_episode_has_no_sample_but_counts_in_the_baseline() -> None:
    group = make_group(0.0, 3.0, 6.0)
    algorithm = GrpoConfig(scale="none")
    samples = {}
    for name, batch in {
        "all": make_batch([group], algorithm),
        "masked": make_batch([mask(group, 2)], algorithm),
    }.items():
        samples[name] = [advantages.max() + advantages.min() for advantages in batch.advantages]
    assert samples == {"all": [-3.0, 0.0, 3.0], "masked": [-3.0, 0.0]}


def test_group_with_masked_episodes_only_is_void() -> None:
    group = make_group(0.0, 3.0)
    assert count_group(mask(group, 0)).num_void_groups == 0
    assert count_group(mask(group, 0, 1)).num_void_groups == 1

"""Rewards of a group: weighted terms, custom functions, and episodes that cannot be scored."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import RewardTerm
from ludus.proto.errors import ConfigError
from ludus.trainer.core.types import (
    GroupSpec,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    ScoredTerm,
    TokenSequence,
    TurnSpan,
)
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode, Reward
from tests.env.counting_env import CountingEnv
from tests.rollout import reward_functions
from tests.rollout.scripted_policy import LIMITS, make_player


def make_term(function: str | None, weight: float = 1.0, name: str | None = None) -> RewardTerm:
    """Return a term with a function of reward_functions.py."""
    path = None if function is None else f"tests.rollout.reward_functions:{function}"
    return RewardTerm(function=path, weight=weight, name=name)


def make_episode(
    value: float | None, status: RolloutStatus = RolloutStatus.TERMINATED, text: str = "ADD 1"
) -> PlayedEpisode:
    """Return an episode of one turn."""
    is_lost = status is RolloutStatus.LOST
    tokens = TokenSequence(np.array([1, 2, 3]), np.array([0.0, -1, -1]), (TurnSpan(1, 3, 0),))
    rollout = Rollout("count", 7, () if is_lost else (tokens,), value, value, (), status, 0)
    completion = [{"role": "assistant", "content": text}]
    return PlayedEpisode(rollout, [{"role": "user", "content": "go"}], completion, [2, 3])


async def score(
    terms: list[RewardTerm], *episodes: PlayedEpisode, timeout_s: float = 60.0
) -> list[Rollout]:
    return await Reward(terms).score(episodes, timeout_s)


async def test_reward_is_the_weighted_sum_of_terms() -> None:
    terms = [
        make_term(None, 2.0),
        make_term("count_words", 0.5),
        make_term("return_if_finished", -1.0, "finished"),
    ]
    [rollout] = await score(terms, make_episode(3.0, text="ADD 1 please"))
    assert rollout.reward == 2 * 3.0 + 0.5 * 3 - 3.0
    assert rollout.episode_return == 3.0
    assert rollout.terms == (
        ScoredTerm("environment", 3.0),
        ScoredTerm("count_words", 3.0),
        ScoredTerm("finished", 3.0),
    )


async def test_reward_is_none_rather_than_zero_if_a_term_returns_none() -> None:
    rollouts = await score(
        [make_term(None), make_term("skip_first_score")], make_episode(1.0), make_episode(1.0)
    )
    assert [rollout.reward for rollout in rollouts] == [None, 3.0]
    assert rollouts[0].terms[0].value == 1.0
    assert rollouts[0].terms[1].value is None


async def test_optional_term_without_a_value_is_left_out_of_the_sum() -> None:
    optional = RewardTerm(function="tests.rollout.reward_functions:skip_first_score", optional=True)
    episodes = [make_episode(1.0), make_episode(1.0)]
    rollouts = await score([make_term(None), optional], *episodes)
    assert [rollout.reward for rollout in rollouts] == [1.0, 3.0]
    rollouts = await score([optional], *episodes)
    assert [rollout.reward for rollout in rollouts] == [None, 2.0]


async def test_lost_episodes_have_no_reward_and_are_not_passed_to_functions() -> None:
    reward_functions.RECORDED_CALLS.clear()
    lost = make_episode(None, RolloutStatus.LOST)
    rollouts = await score(
        [make_term("record_arguments"), make_term("count_words")], lost, make_episode(1.0), lost
    )
    assert [rollout.reward for rollout in rollouts] == [None, 2.0, None]
    assert [term.value for term in rollouts[0].terms] == [None, None]
    [call] = reward_functions.RECORDED_CALLS
    assert {len(column) for column in call.values()} == {1}
    reward_functions.RECORDED_CALLS.clear()
    await score([make_term("record_arguments")], lost, lost)
    assert reward_functions.RECORDED_CALLS == []


async def test_synchronous_function_does_not_block_the_event_loop() -> None:
    reward_functions.LOOP_EVENT.clear()
    asyncio.get_running_loop().call_later(0.05, reward_functions.LOOP_EVENT.set)
    [rollout] = await score([make_term("wait_for_loop")], make_episode(1.0))
    assert rollout.reward == 1.0
    reward_functions.THREAD_IDS.clear()
    await score([make_term("record_arguments")], make_episode(1.0))
    assert reward_functions.THREAD_IDS.isdisjoint({threading.get_ident()})


async def test_weighted_sum_that_is_too_large_voids_the_episode() -> None:
    terms = [RewardTerm(weight=1e300), RewardTerm(weight=1e300, function=make_term(None).function)]
    large, small = await score(terms, make_episode(5e11), make_episode(0.0))
    assert (large.status, large.reward) == (RolloutStatus.FAILED, None)
    assert "weighted sum of the reward's terms" in large.failure
    assert small.reward == 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "return_too_few",
            "must return a list of 2 numbers or None, one per episode, but it returned 1",
        ),
        (
            "return_no_list",
            "must return a list of 2 numbers or None, one per episode, but it returned",
        ),
        ("return_nan", "returned nan for episode 0"),
        ("return_huge", r"between -1e\+12 and 1e\+12, or None, but it returned -1e\+308"),
        ("return_long_integer", "or None, but it returned 10{50}"),
        ("return_words", "returned 'good' for episode 0"),
        ("raise_key_error", r"\(term 'raise_key_error'\) raised KeyError: 'answer'"),
        ("exit_process", r"\(term 'exit_process'\) raised SystemExit: 3"),
        ("exit_from_event_loop", r"raised SystemExit: 3"),
        ("require_unknown_column", "requires 'moon', which no episode of the group has"),
        ("wait_forever", "did not return within rollout.group_timeout_s = 0.2 s"),
    ],
)
async def test_invalid_or_failed_function_is_reported_with_the_reason(
    function: str, message: str
) -> None:
    timeout_s = 0.2 if function == "wait_forever" else 60.0
    episodes = make_episode(1.0), make_episode(2.0)
    rollouts = await score([make_term(None), make_term(function)], *episodes, timeout_s=timeout_s)
    for rollout in rollouts:
        assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
        assert re.search(message, rollout.failure)
        assert f"tests.rollout.reward_functions:{function}" in rollout.failure
    assert [rollout.episode_return for rollout in rollouts] == [1.0, 2.0]


async def test_the_location_of_an_error_is_reported() -> None:
    [rollout] = await score([make_term("raise_key_error")], make_episode(1.0))
    assert "(in raise_key_error, reward_functions.py:" in rollout.failure


async def test_failed_function_of_weight_0_is_reported_but_voids_no_episode() -> None:
    [rollout] = await score([make_term(None), make_term("raise_key_error", 0.0)], make_episode(1.0))
    assert (rollout.status, rollout.reward) == (RolloutStatus.TERMINATED, 1.0)
    assert "KeyError" in rollout.failure


async def test_term_of_weight_0_is_recorded_but_not_added() -> None:
    terms = [make_term(None), make_term("skip_first_score", 0.0)]
    rollouts = await score(terms, make_episode(1.0), make_episode(1.0))
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    assert [rollout.terms[1].value for rollout in rollouts] == [None, 2.0]


@pytest.mark.parametrize(
    ("terms", "expected_reward"),
    [
        ([make_term(None)], 3.0),
        ([make_term(None, 0.5), make_term("count_words", 5.0)], 26.5),
        ([make_term("count_words", 5.0)], 24.3),
        ([make_term(None, 0.0), make_term("count_words", 5.0)], 24.3),
    ],
    ids=["the environment's own", "both", "a function alone", "the environment's own, weightless"],
)
async def test_invalid_action_has_a_penalty_with_all_reward_terms(
    terms: list[RewardTerm], expected_reward: float
) -> None:
    # The environment's reward includes the penalty; five words have a reward of 25.
    invalid_episode = make_episode(3.0, RolloutStatus.INVALID_ACTION, "What is to be done?")
    [rollout] = await Reward(terms, invalid_action_reward=-0.7).score([invalid_episode], 60.0)
    assert rollout.reward == pytest.approx(expected_reward)
    assert rollout.status is RolloutStatus.INVALID_ACTION


async def test_hanging_functions_do_not_block_other_threads() -> None:
    reward = Reward([make_term("wait_for_test_end")])
    try:
        scores = [reward.score([make_episode(1.0)], timeout_s=0.05) for _ in range(80)]
        for [rollout] in await asyncio.gather(*scores):
            assert rollout.status is RolloutStatus.FAILED
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), timeout=20) == "free"
    finally:
        reward_functions.TEST_END_EVENT.set()


@pytest.mark.parametrize(
    ("function", "message"),
    [("no_such_function", "has no callable"), ("take_positional_only", "remove the '/'")],
)
def test_invalid_reward_function_is_rejected_before_the_first_episode(
    function: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Reward([make_term(function)])


@pytest_asyncio.fixture
async def env_client() -> AsyncIterator[AsyncEnvClient]:
    async with (
        EnvServer(CountingEnv, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        yield client


async def play_counting(
    client: AsyncEnvClient, chat: ChatTokenizer, *terms: RewardTerm, script: tuple[str, ...]
) -> RolloutGroup:
    """Play three episodes of the counting environment with the same script."""
    player, _ = make_player(client, chat, itertools.cycle(script), LIMITS, reward=Reward(terms))
    groups = [await player.play_group(GroupSpec(0, "count", (index,))) for index in range(2)]
    return groups[-1]


async def test_functions_receive_prompts_completions_and_rollout_fields(
    env_client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    reward_functions.RECORDED_CALLS.clear()
    group = await play_counting(
        env_client,
        chat,
        make_term("record_arguments"),
        make_term("read_added_field"),
        script=("ADD 1", "ADD 2", "ADD 7"),
    )
    call = reward_functions.RECORDED_CALLS[-1]
    assert call["prompts"] == [[{"role": "user", "content": "Count to the end. Total 0."}]]
    assert call["completions"] == [
        [
            {"role": "assistant", "content": "ADD 1"},
            {"role": "user", "content": "Total 1."},
            {"role": "assistant", "content": "ADD 2"},
            {"role": "user", "content": "Total 3."},
            {"role": "assistant", "content": "ADD 7"},
        ]
    ]
    sampled_ids = [
        *chat.encode_completion("ADD 1"),
        *chat.encode_completion("ADD 2"),
        *chat.encode_completion("ADD 7"),
    ]
    assert call["completion_ids"] == [sampled_ids]
    assert call["episode_return"] == [10.0]
    assert (call["status"], call["terminated"]) == (["truncated"], [False])
    assert (call["seed"], call["environment"], call["num_turns"]) == ([1], ["game"], [3])
    assert call["added"] == [7], "a field of the last result's info"
    assert group.rollouts[0].reward == 7.0


@pytest.mark.slow
async def test_failing_function_voids_the_group_and_leaves_no_session(
    chat: ChatTokenizer,
) -> None:
    async with (
        EnvServer(CountingEnv, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        reward = Reward([make_term("raise_key_error")])
        player, _ = make_player(client, chat, itertools.repeat("ADD 1"), LIMITS, reward=reward)
        group = await player.play_group(GroupSpec(0, "count", (1, 1)))
        assert group.rewards == [None, None]
        assert "reward_functions:raise_key_error" in group.rollouts[0].failure
        assert server.core.load.num_sessions == 0

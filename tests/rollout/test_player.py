"""Tests of players that are built from a run configuration."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.trainer.core.types import GroupSpec, RolloutStatus
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.runner import episode_limits
from tests.rollout.scripted_policy import SAMPLING, ScriptedPolicy, start_player

FUNCTIONS = "tests.rollout.reward_functions"


def make_run(**environment: Any) -> LanguageModelRun:
    """Return a run with two blackjack environments."""
    return LanguageModelRun.model_validate(
        {
            "seed": 3,
            "rollout": {"max_turns": 6, "max_tokens": 200, "max_completion_tokens": 9},
            "environments": {"cards": environment, "default_cards": {}},
        }
    )


def test_environment_limits_override_run_limits() -> None:
    run = make_run(max_turns=2, max_tokens=100, max_completion_tokens=5)
    limits, default_limits = episode_limits(run, "cards"), episode_limits(run, "default_cards")
    assert (limits.max_turns, limits.max_tokens, limits.max_completion_tokens) == (2, 100, 5)
    assert default_limits == run.rollout
    assert episode_limits(make_run(max_turns=2), "cards").max_tokens == 200


@pytest.mark.parametrize("terms", [[{}], [{"function": f"{FUNCTIONS}:count_words", "weight": 0}]])
async def test_each_environment_has_its_own_reward_of_an_invalid_action(
    client: AsyncEnvClient, chat: ChatTokenizer, terms: list[dict[str, Any]]
) -> None:
    run = make_run(invalid_action_reward=-2.5, rewards=terms)
    policy = ScriptedPolicy(chat, itertools.repeat("no action"))
    player = await start_player(run, "cards", client, policy, chat)
    [group] = await player.play_groups([GroupSpec(0, "cards", (4, 4))], SAMPLING, [0])
    assert [(rollout.reward, rollout.episode_return) for rollout in group.rollouts] == [
        (-2.5, -2.5)
    ] * 2


async def test_player_uses_limits_and_rewards_of_the_environment(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    rewards = [{"weight": 2.0}, {"function": f"{FUNCTIONS}:count_words", "weight": 100}]
    run = make_run(max_turns=1, rewards=rewards)
    policy = ScriptedPolicy(chat, itertools.repeat("STAND"))
    player = await start_player(run, "cards", client, policy, chat)
    [group] = await player.play_groups([GroupSpec(0, "cards", (4, 4))], SAMPLING, [0])
    assert group.environment == "cards"
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.TERMINATED
        assert rollout.episode_return is not None
        assert rollout.reward == 2 * rollout.episode_return + 100
        assert [term.name for term in rollout.terms] == ["environment", "count_words"]


async def test_equal_seeds_give_different_sampling_seeds_per_environment(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    run = make_run(max_turns=1)
    seeds = []
    for name in ("cards", "default_cards"):
        policy = ScriptedPolicy(chat, itertools.repeat("STAND"))
        player = await start_player(run, name, client, policy, chat)
        await player.evaluate([2**31], SAMPLING)
        seeds.append(policy.seeds[0])
    assert seeds[0] != seeds[1]


async def test_rollout_function_that_exits_fails_only_the_episode(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    run = make_run(rollout=f"{FUNCTIONS}:exit_in_episode")
    policy = ScriptedPolicy(chat, itertools.repeat("STAND"))
    player = await start_player(run, "cards", client, policy, chat)
    [rollout] = await player.evaluate([2**31], SAMPLING)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert "SystemExit: 3" in rollout.failure


@pytest.mark.slow
async def test_rollout_function_is_imported_by_name(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    run = make_run(rollout=f"{FUNCTIONS}:play_in_pairs")
    policy = ScriptedPolicy(chat, itertools.cycle(["a poor hand", "STAND"]))
    player = await start_player(run, "cards", client, policy, chat)
    [rollout] = await player.evaluate([4], SAMPLING)
    assert len(rollout.turns) == 2
    invalid_run = make_run(rollout=f"{FUNCTIONS}:no_such_function")
    with pytest.raises(ConfigError, match=r"environment\.rollout"):
        await start_player(invalid_run, "cards", client, policy, chat)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"rollout": "a:b", "tools": True}, "tools cannot be combined"),
        ({"rollout": "a:b", "render": "a:b", "parse": "a:b"}, "parse cannot be combined"),
        ({"rewards": [{}, {"name": "environment", "function": "a:b"}]}, "two terms with the name"),
        ({"max_tokens": 201}, "max_tokens = 201"),
        ({"max_completion_tokens": 200}, "max_completion_tokens = 200"),
    ],
)
def test_incompatible_settings_are_rejected_during_parsing(
    environment: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_run(**environment)


@pytest.mark.parametrize("section", ["rollout", "eval"])
def test_temperature_above_the_vllm_maximum_is_rejected_during_parsing(section: str) -> None:
    settings = {section: {"temperature": 2.5}}
    with pytest.raises(ValueError, match=rf"{section}\.temperature = 2\.5"):
        LanguageModelRun.model_validate({"generator": {"kind": "vllm"}, **settings})
    assert LanguageModelRun.model_validate(settings)

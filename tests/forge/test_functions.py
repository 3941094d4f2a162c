"""Adapters that turn Forge's reward and advantage functions into those of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.functions import (
    CustomFunctions,
    make_group_function,
    make_reward_term,
)

PROMPTS = [[{"role": "system", "content": "Play."}, {"role": "user", "content": "hard 16 vs 10"}]]
COMPLETIONS = [
    [
        {"role": "assistant", "content": "HIT"},
        {"role": "user", "content": "hard 19 vs 10"},
        {"role": "assistant", "content": "STAND"},
    ]
]


def evaluate_response(prompt: str, response: str, game_reward: float) -> float:
    return game_reward if (prompt, response) == ("Play.\nhard 16 vs 10", "STAND") else -9.0


class RewardActor:
    async def evaluate_response(self, prompt: str, response: str, game_reward: float) -> float:
        return evaluate_response(prompt, response, game_reward)


@pytest.mark.parametrize("reward", [evaluate_response, RewardActor, RewardActor()])
async def test_reward_receives_first_prompt_last_response_and_return(reward: Any) -> None:
    term = make_reward_term(reward)
    assert await term(prompts=PROMPTS, completions=COMPLETIONS, episode_return=[0.5]) == [0.5]


def test_advantages_come_from_a_class_an_object_or_a_function() -> None:
    class CenteringAdvantages:
        def compute(self, group: list[Any]) -> list[float]:
            mean = sum(episode.reward for episode in group) / len(group)
            return [episode.reward - mean for episode in group]

    group = [SimpleNamespace(reward=reward) for reward in (1.0, 3.0)]
    for function in (CenteringAdvantages, CenteringAdvantages(), CenteringAdvantages().compute):
        assert make_group_function(function)(group) == [-1.0, 1.0]


async def test_a_reward_may_be_none() -> None:
    term = make_reward_term(lambda prompt, response, game_reward: None)
    assert await term(prompts=PROMPTS, completions=COMPLETIONS, episode_return=[0.5]) == [None]


@pytest.mark.parametrize("reward", [5, object, lambda answer, success: 1.0])
def test_functions_with_invalid_parameters_are_refused(reward: Any) -> None:
    with pytest.raises(ConfigError, match=r"reward must be a function of \(prompt, response, gam"):
        make_reward_term(reward)
    with pytest.raises(ConfigError, match=r"compute_advantages must be a function of \(group\)"):
        make_group_function(reward)


def test_only_custom_functions_change_the_run_configuration() -> None:
    sections: dict[str, Any] = {"environments": {"blackjack": {"address": "x"}}}
    CustomFunctions().add_to(sections)
    assert sections == {"environments": {"blackjack": {"address": "x"}}}
    CustomFunctions(compute_advantages=len, render=str).add_to(sections)
    assert (sections["algorithm"]["scale"], sections["algorithm"]["baseline"]) == ("none", "mean")
    assert sections["environments"]["blackjack"] == {"address": "x", "render": str}

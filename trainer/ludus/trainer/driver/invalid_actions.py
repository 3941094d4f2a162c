"""The reward of an invalid action, chosen from the returns that the environment declares.

    set in the file                     that value
    the environment declares returns    min(lowest, 0) - max(highest, (highest - lowest) / 2)
    otherwise                           -1

With the second formula, an episode with an invalid action never ends above the lowest return, even
after rewards in earlier turns. The difference from a lost episode scales with the rewards. A policy
that does not know the format of the answers therefore learns the format before it wins episodes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ludus.env.targets.targets import environment_factory
from ludus.env.types import ReturnRange
from ludus.proto.config import (
    EnvironmentConfig,
    LanguageModelRun,
    LocalEnvironment,
    RewardTerm,
    RolloutConfig,
)
from ludus.trainer.setup.environments import fetch_description

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Choice:
    reward: float
    reason: str


def resolve_invalid_action_rewards(
    run: LanguageModelRun, return_ranges: Mapping[str, ReturnRange | None]
) -> LanguageModelRun:
    """Return the run with the reward of an invalid action set for each environment, and log it.

    A single environment's reward is set in section `rollout`, so that an override of
    rollout.invalid_action_reward has an effect when the run is resumed.

    Args:
        return_ranges: declared returns by environment; None if an environment declares none.
    """
    choices = {
        name: _choose(run.rollout, config, return_ranges.get(name))
        for name, config in run.environments.items()
    }
    for name, choice in choices.items():
        _log.info(
            "environment '%s': the reward of an invalid action is %g, because %s",
            *(name, choice.reward, choice.reason),
        )
    if not needs_choice(run):
        return run
    if len(choices) == 1:
        (choice,) = choices.values()
        rollout = run.rollout.model_copy(update={"invalid_action_reward": choice.reward})
        return run.model_copy(update={"rollout": rollout})
    environments = {
        name: config.model_copy(update={"invalid_action_reward": choices[name].reward})
        for name, config in run.environments.items()
    }
    return run.model_copy(update={"environments": environments})


def needs_choice(run: LanguageModelRun) -> bool:
    """Return whether the reward of an invalid action is not set for some environment."""
    return run.rollout.invalid_action_reward is None and any(
        config.invalid_action_reward is None for config in run.environments.values()
    )


async def fetch_return_ranges(run: LanguageModelRun) -> dict[str, ReturnRange | None]:
    """Return the returns that each environment declares, before the run starts its servers.

    Raises:
        ConfigError: a remote environment cannot be reached.
    """
    return {name: await _fetch_return_range(run, name) for name in run.environments}


async def _fetch_return_range(run: LanguageModelRun, name: str) -> ReturnRange | None:
    config = run.environments[name]
    if not isinstance(config, LocalEnvironment):
        return (await fetch_description(run, name)).return_range
    environment = environment_factory(config.package, config.options)()
    try:
        return environment.return_range
    finally:
        environment.close()


def _choose(
    rollout: RolloutConfig, config: EnvironmentConfig, return_range: ReturnRange | None
) -> _Choice:
    reward = config.invalid_action_reward
    reward = rollout.invalid_action_reward if reward is None else reward
    if reward is not None:
        return _Choice(reward, "the configuration sets it")
    default = rollout.known_invalid_action_reward
    advice = "; set rollout.invalid_action_reward if the rewards have another scale"
    if not _is_return_rewarded(config):
        return _Choice(default, f"the environment's return is not part of the reward{advice}")
    if return_range is None:
        return _Choice(default, f"the environment does not declare its returns{advice}")
    reason = f"returns are from {return_range.lowest:g} to {return_range.highest:g}"
    return _Choice(return_range.invalid_action_reward, reason)


def _is_return_rewarded(config: EnvironmentConfig) -> bool:
    """Return whether the environment's return is a term of the reward."""
    return any(
        isinstance(term, RewardTerm) and term.function is None and term.weight != 0
        for term in config.rewards
    )

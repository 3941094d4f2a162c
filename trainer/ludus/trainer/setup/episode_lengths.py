"""The lengths of episodes with random actions, compared with the limits of a run."""

from __future__ import annotations

import logging
import time

from ludus.env.contract.players import draw_legal_action
from ludus.env.environment import AnyEnvironment
from ludus.env.targets.targets import check_environment_options
from ludus.proto.config import LanguageModelRun, LocalEnvironment
from ludus.trainer.core import streams
from ludus.trainer.core.output import warn_user

_log = logging.getLogger(__name__)

_NUM_EPISODES = 20
_MAX_TIME_S = 0.5
"""Time after which no further step is taken."""


def warn_of_short_limits(run: LanguageModelRun) -> None:
    """Warn the user if most episodes with random actions exceed the limit of turns.

    Such episodes are truncated, so the policy rarely sees how they end. Environments on servers,
    agents and rollout functions are not tried.
    """
    for name, config in run.environments.items():
        if not isinstance(config, LocalEnvironment) or config.rollout or config.agent:
            continue
        max_turns = config.max_turns or run.rollout.max_turns
        environment = check_environment_options(config.package, config.options)
        try:
            num_turns = measure_turns(environment, max_turns, run.seed)
        except Exception as error:  # noqa: BLE001 - third-party code
            _log.warning("environment '%s' cannot be played: %s", name, error)
            continue
        finally:
            environment.close()
        num_long = sum(number > max_turns for number in num_turns)
        if num_long * 2 > len(num_turns):
            section = run.environment_section(name)
            warn_user(
                f"environment '{name}': {num_long} of {len(num_turns)} episodes with random "
                f"actions need more than {max_turns} turns, and longer ones are truncated; raise "
                f"{section}.max_turns"
            )


def measure_turns(environment: AnyEnvironment, max_turns: int, seed: int) -> list[int]:
    """Return the numbers of turns of some episodes with random legal actions.

    An episode ends after `max_turns` + 1 turns. Episodes that do not end in time are left out.
    """
    generator = streams.make_random(seed, streams.Stream.TRIAL_ACTIONS)
    end_s = time.monotonic() + _MAX_TIME_S
    lengths: list[int] = []
    for episode_seed in range(_NUM_EPISODES):
        transition, num_turns = environment.reset(seed=episode_seed), 0
        while not (transition.terminated or transition.truncated) and num_turns <= max_turns:
            if time.monotonic() > end_s:
                return lengths
            action = draw_legal_action(environment, transition.observation, generator)
            transition, num_turns = environment.step(action), num_turns + 1
        lengths.append(num_turns)
    return lengths

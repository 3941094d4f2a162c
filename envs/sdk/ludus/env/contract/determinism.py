"""A quick check of an environment's determinism for the start of a server."""

from __future__ import annotations

import logging
import random
import time

from ludus.env.contract.players import CheckedEnvironment, random_legal_action
from ludus.env.contract.rules import (
    BrokenRuleError,
    parallel_episodes_are_independent,
    same_seed_and_actions_give_the_same_episode,
)
from ludus.env.environment import AnyEnvironment
from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.env.types import Action, Observation
from ludus.proto.errors import LudusError

_log = logging.getLogger(__name__)

_SEEDS = (1, 2)
_NUM_STEPS = 8


class _OutOfTimeError(LudusError):
    """The environment is too slow for a check during the start of a server."""


def is_deterministic(factory: EnvironmentFactory, budget_s: float = 2.0) -> bool:
    """Return True if equal seeds and actions give equal episodes, also in parallel.

    False means not verified: the environment lists no legal actions, raises an error, or takes
    longer than the budget, which is checked between steps.
    """
    deadline_s = time.monotonic() + budget_s
    num_steps = 0

    def choose(
        environment: AnyEnvironment, observation: Observation, generator: random.Random
    ) -> Action:
        nonlocal num_steps
        _stop_after(deadline_s)
        num_steps += 1
        return random_legal_action(environment, observation, generator)

    def make() -> AnyEnvironment:
        _stop_after(deadline_s)
        return factory()

    checked_environment = CheckedEnvironment(make, _SEEDS, _NUM_STEPS, choose)
    state = random.getstate()
    try:
        same_seed_and_actions_give_the_same_episode(checked_environment)
        parallel_episodes_are_independent(checked_environment)
    except BrokenRuleError as error:
        _log.warning("environment treated as not deterministic: %s", error)
        return False
    except _OutOfTimeError as error:
        _log.warning(
            "environment treated as not deterministic: %s after %d steps; if it is deterministic,"
            " serve it with --deterministic",
            error,
            num_steps,
        )
        return False
    except Exception as error:  # noqa: BLE001 - an error of third-party code is the result
        _log.info("could not check whether the environment is deterministic: %s", error)
        return False
    finally:
        random.setstate(state)
        checked_environment.close()
    return True


def _stop_after(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise _OutOfTimeError("the determinism check reached its time limit")

"""Whether an environment is seen to be deterministic, in the time that a start may take."""

from __future__ import annotations

import logging
import random
import time

from ludus.env.contract.players import CheckedEnvironment, random_legal_action
from ludus.env.contract.rules import (
    BrokenRuleError,
    another_session_changes_nothing,
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
    """The environment is too slow to be checked while a server starts."""


def is_deterministic(factory: EnvironmentFactory, budget_s: float = 2.0) -> bool:
    """True when the same seeds and actions gave the same episodes, alone and side by side.

    False where it could not be seen: the environment lists no legal actions, fails, or takes
    longer than the budget, which is looked at between steps.
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

    checked = CheckedEnvironment(make, _SEEDS, _NUM_STEPS, choose)
    state = random.getstate()
    try:
        same_seed_and_actions_give_the_same_episode(checked)
        another_session_changes_nothing(checked)
    except BrokenRuleError as error:
        _log.warning("taken for not deterministic: %s", error)
        return False
    except _OutOfTimeError as error:
        _log.warning(
            "taken for not deterministic: %s after %d steps; if it is, serve with --deterministic",
            error,
            num_steps,
        )
        return False
    except Exception as error:  # noqa: BLE001 - foreign code: what it raises is the finding
        _log.info("could not see whether it is deterministic: %s", error)
        return False
    finally:
        random.setstate(state)
        checked.close()
    return True


def _stop_after(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise _OutOfTimeError("the check of its determinism ran out of time")

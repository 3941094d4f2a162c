"""Blackjack that raises an error in 1 % of the training episodes, selected by seed."""

from __future__ import annotations

from ludus.env import Transition
from openspiel_env.models import OpenSpielAction, OpenSpielObservation
from openspiel_env.server.openspiel_environment import OpenSpielEnvironment

FAILURE_INTERVAL = 100
_FIRST_EVALUATION_SEED = 2**30


class RaisingBlackjack(OpenSpielEnvironment):
    """Blackjack that raises an error in the first step of the selected episodes."""

    _is_failing = False

    def reset(  # type: ignore[override]  # same signature as in OpenSpielEnvironment
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[OpenSpielObservation]:
        is_training = seed is not None and seed < _FIRST_EVALUATION_SEED
        self._is_failing = is_training and seed % FAILURE_INTERVAL == 0
        return super().reset(seed=seed, episode_id=episode_id)

    def step(self, action: OpenSpielAction) -> Transition[OpenSpielObservation]:
        if self._is_failing:
            raise RuntimeError("the shoe is empty")
        return super().step(action)

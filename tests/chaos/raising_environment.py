"""Blackjack that raises in one of a hundred of training's episodes, which their seeds decide."""

from __future__ import annotations

from ludus.env import Transition
from openspiel_env.models import OpenSpielAction, OpenSpielObservation
from openspiel_env.server.openspiel_environment import OpenSpielEnvironment

ONE_IN = 100
_FIRST_SEED_OF_NO_TRAINING = 2**30


class RaisingBlackjack(OpenSpielEnvironment):
    """Raises in the first step of these; an evaluation has other seeds, and judges undisturbed."""

    _raises = False

    def reset(  # type: ignore[override]  # as OpenSpielEnvironment's
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[OpenSpielObservation]:
        is_trained_on = seed is not None and seed < _FIRST_SEED_OF_NO_TRAINING
        self._raises = is_trained_on and seed % ONE_IN == 0
        return super().reset(seed=seed, episode_id=episode_id)

    def step(self, action: OpenSpielAction) -> Transition[OpenSpielObservation]:
        if self._raises:
            raise RuntimeError("the shoe is empty")
        return super().step(action)

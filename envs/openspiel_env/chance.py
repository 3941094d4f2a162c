"""Drawing chance events cheaply; each draw takes exactly one number from the stream."""

from __future__ import annotations

import random

import pyspiel


def draw_uniform(state: pyspiel.State, rng: random.Random) -> int:
    """The chance event that happens where all are equally likely."""
    events = state.legal_actions()
    return events[int(rng.random() * len(events))]


def draw_weighted(state: pyspiel.State, rng: random.Random) -> int:
    """The chance event that happens, by the game's probabilities."""
    remaining = rng.random()
    events = state.chance_outcomes()
    for event, probability in events:
        remaining -= probability
        if remaining < 0:
            return event
    # Probabilities that sum to a hair less than 1 leave this gap to the last possible event.
    return next(event for event, probability in reversed(events) if probability > 0)

"""Chance events drawn cheaply; each draw takes exactly one number from the stream."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import TypeAlias

import pyspiel

_WORDS = struct.Struct("<8Q")
_UNIT = 2.0**-53
_PERSON = b"openspiel_env"  # other uses of a seed draw other numbers


class ChanceStream:
    """Numbers that are uniform between 0 and 1 and follow from a seed.

    The words of BLAKE2b over seed and block number, as `random.Random` would cut them to
    floats. A new stream per episode is much of what a short episode costs, and seeding the
    standard generator takes longer than all the draws of most games.
    """

    __slots__ = ("_num_blocks", "_seed", "_words")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_blocks = 0
        self._words: list[int] = []

    def random(self) -> float:
        """The next number, from 0 up to but without 1."""
        return ((self._words or self._next_words()).pop() >> 11) * _UNIT

    def pick(self, events: list[int]) -> int:
        """One of the events, all equally likely; it takes the next number."""
        return events[(self._words or self._next_words()).pop() * len(events) >> 64]

    def _next_words(self) -> list[int]:
        block = b"%d/%d" % (self._seed, self._num_blocks)
        self._num_blocks += 1
        self._words = list(_WORDS.unpack(hashlib.blake2b(block, person=_PERSON).digest()))
        return self._words


Draws: TypeAlias = ChanceStream | random.Random


def draw_weighted(state: pyspiel.State, draws: Draws) -> int:
    """The chance event that happens, by the game's probabilities."""
    remaining = draws.random()
    events = state.chance_outcomes()
    for event, probability in events:
        remaining -= probability
        if remaining < 0:
            return event
    # Probabilities that sum to a hair less than 1 leave this gap to the last possible event.
    return next(event for event, probability in reversed(events) if probability > 0)

"""Fast draws of chance events. Each draw uses exactly one number of the stream."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import TypeAlias

import pyspiel

_WORDS_FORMAT = struct.Struct("<8Q")
_FLOAT_SCALE = 2.0**-53
_HASH_LABEL = b"openspiel_env"  # separates this stream from other uses of the seed


class ChanceStream:
    """A stream of uniform numbers from 0 to 1, determined by a seed.

    The numbers are BLAKE2b hashes of the seed and a block number, converted to floats like those
    of `random.Random`. Seeding the standard generator would take longer than all draws of most
    games.
    """

    __slots__ = ("_num_blocks", "_seed", "_words")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_blocks = 0
        self._words: list[int] = []

    def random(self) -> float:
        """Return the next number, at least 0 and below 1."""
        return ((self._words or self._make_words()).pop() >> 11) * _FLOAT_SCALE

    def pick_event(self, events: list[int]) -> int:
        """Return one of the events, all equally likely."""
        return events[(self._words or self._make_words()).pop() * len(events) >> 64]

    def _make_words(self) -> list[int]:
        block = b"%d/%d" % (self._seed, self._num_blocks)
        self._num_blocks += 1
        self._words = list(
            _WORDS_FORMAT.unpack(hashlib.blake2b(block, person=_HASH_LABEL).digest())
        )
        return self._words


RandomSource: TypeAlias = ChanceStream | random.Random


def draw_weighted(state: pyspiel.State, random_source: RandomSource) -> int:
    """Draw a chance event with the game's probabilities."""
    remaining_probability = random_source.random()
    events = state.chance_outcomes()
    for event, probability in events:
        remaining_probability -= probability
        if remaining_probability < 0:
            return event
    # Rounding: the probabilities sum to slightly less than 1.
    return next(event for event, probability in reversed(events) if probability > 0)

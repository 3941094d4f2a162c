"""Random numbers that follow from counters alone, so that what is replayed is sampled again.

    run seed, seed of the episode, sample index, turn --mix--> seed of a request
    seed of a request, position in the answer --uniforms--> one random number

Nothing here keeps a state: what else is sampled, and in which order, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_64_BITS = 2**64


def mix(*counters: int) -> int:
    """A seed of 63 bits; counters that differ anywhere give unrelated seeds.

    Each counter is taken in by splitmix64: https://prng.di.unimi.it/splitmix64.c
    """
    value = 0
    for counter in counters:
        value = _finalised((value ^ counter % _64_BITS) + _GOLDEN)
    return value >> 1


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """[N] float32 in [0, 1): the number at each seed's position, from splitmix64's stream."""
    position = np.asarray(positions, dtype=np.uint64) + np.uint64(1)
    value = np.asarray(seeds, dtype=np.uint64) + position * np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    value ^= value >> np.uint64(31)
    # The 24 highest bits are what a float32 below 1 can hold.
    return (value >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _finalised(value: int) -> int:
    value %= _64_BITS
    value = ((value ^ (value >> 30)) * _FIRST) % _64_BITS
    value = ((value ^ (value >> 27)) * _SECOND) % _64_BITS
    return value ^ (value >> 31)

"""Where every random number of a run comes from: a stream for each purpose, and keys in it.

    run seed, purpose --SeedSequence--> root of the stream --mix(counters)--> key
    key, turn ------------------------------------------------------mix-----> key of a request
    key of a request, position in the answer --uniforms--> one random number

Two purposes share no number, whatever their counters: their roots are what numpy's
`SeedSequence.spawn` gives to two children, https://numpy.org/doc/stable/reference/random/parallel.html
Nothing here keeps a state: what else is drawn, and in which order, changes nothing. What draws
random numbers in the trainer takes them from here (`tests/house/test_streams.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, unique
from functools import lru_cache

import numpy as np
import torch

from ludus.proto.seeds import FIRST_WARM_START_SEED

VERSION = 1
"""Another one gives other random numbers: a run does not go on under it (`checkpoint.py`)."""


@unique
class Stream(IntEnum):
    """What random numbers are drawn for.

    A purpose keeps its number for ever, and the number of one that is gone is not given again:
    numbers that move are other random numbers, and need another VERSION.
    """

    INITIAL_WEIGHTS = 1
    """Of a tiny model."""
    LEARNER = 2
    """Whatever a learner rank draws: a value head and adapters begin at random."""
    WARM_START_EPISODE = 3
    """Seeds of environments. Counters: place of the environment in the run, game."""
    WARM_START_ANSWER = 4
    """Counters: place of the environment, game."""
    WARM_START_ORDER = 5
    """In which the games are learned from."""
    TRAINING_EPISODE = 6
    """Seeds of environments. Counters: index of the group, number in it."""
    TRAINING_SAMPLING = 7
    """Counters: index of the group, number in it."""
    EVALUATION_SAMPLING = 8
    """Counters: place of the environment, seed of the episode."""
    ANSWER = 9
    """To messages of the user's own. Counters: the user's seed, number of the answer."""
    REWARD_SHUFFLE = 10
    """Counter: version of the policy."""
    TRANSCRIPT = 11
    """Which groups are written down. Counter: block, of as many groups as a step trains on."""
    REWARD_MODEL = 20
    """What the training of a reward model draws: the head's first weights, dropout."""
    REWARD_MODEL_SPLIT = 21
    """Which comparisons are held out."""
    REWARD_MODEL_ORDER = 22
    """In which they are learned from. Counter: epoch."""
    PROBLEM_SPLIT = 30
    """Which of an environment's problems are held back."""
    REPLAY_BUFFER = 60
    """Which episodes a part's replay buffer gives out; runs have no such draw."""

    NETWORK_WEIGHTS = 40
    """Initial ones of a network."""
    NETWORK_SAMPLING = 41
    """Actions of a network. Counters: update, block of steps."""
    NETWORK_ORDER = 42
    """Of the steps in an update. Counters: update, pass."""
    NETWORK_EVALUATION = 43
    """Actions of a network in an evaluation. Counter: step."""
    RANDOM_ACTIONS = 44
    """Of the random policy that a network is compared with. Counter: step."""


_NUM_SEEDS = FIRST_WARM_START_SEED
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_64_BITS = 2**64


def key_of(run_seed: int, stream: Stream, *counters: int) -> int:
    """A key of 63 bits; keys that differ anywhere, in length too, are unrelated."""
    return mix(_root(run_seed, stream), *counters)


def mix(key: int, *counters: int) -> int:
    """A key below `key`, of 63 bits; counters that differ anywhere give unrelated ones.

    Each counter, up to 64 bits, is taken in by splitmix64: https://prng.di.unimi.it/splitmix64.c
    """
    value = 0
    for counter in (key, *counters):
        value = _finalised((value ^ counter % _64_BITS) + _GOLDEN)
    return value >> 1


def random_of(run_seed: int, stream: Stream, *counters: int) -> random.Random:
    """A generator of Python's own, which draws from the stream."""
    return random.Random(key_of(run_seed, stream, *counters))


def seed_torch(run_seed: int, stream: Stream, *counters: int) -> None:
    """Let torch draw from the stream, in this process."""
    torch.manual_seed(key_of(run_seed, stream, *counters))


@contextmanager
def torch_seeded(run_seed: int, stream: Stream, *counters: int) -> Iterator[None]:
    """Let torch draw from the stream on the CPU within the block, and go on as before afterwards.

    Only the CPU's generator is seeded: torch.manual_seed keeps a call, with a traceback that takes
    longer than a small network's update, for each kind of device that has not been used yet.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key_of(run_seed, stream, *counters))
        yield


def training_seed(run_seed: int, index: int, number: int) -> int:
    """The seed of an episode of group `index`: below 2**30."""
    return key_of(run_seed, Stream.TRAINING_EPISODE, index, number) % _NUM_SEEDS


def warm_start_seed(run_seed: int, place: int, game: int) -> int:
    """The seed of a game of the warm start: from 2**30, below 2**31, where evaluations begin."""
    key = key_of(run_seed, Stream.WARM_START_EPISODE, place, game)
    return _NUM_SEEDS + key % _NUM_SEEDS


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """[N] float32 in [0, 1): the number at each key's position, from splitmix64's stream."""
    position = np.asarray(positions, dtype=np.uint64) + np.uint64(1)
    value = np.asarray(keys, dtype=np.uint64) + position * np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    value ^= value >> np.uint64(31)
    # The 24 highest bits are what a float32 below 1 can hold.
    return (value >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


@lru_cache(maxsize=256)
def _root(run_seed: int, stream: Stream) -> int:
    """64 bits; computed once, since it takes ten times as long as to mix a counter in."""
    sequence = np.random.SeedSequence(run_seed, spawn_key=(stream,))
    return int(sequence.generate_state(1, np.uint64)[0])


def _finalised(value: int) -> int:
    value %= _64_BITS
    value = ((value ^ (value >> 30)) * _FIRST) % _64_BITS
    value = ((value ^ (value >> 27)) * _SECOND) % _64_BITS
    return value ^ (value >> 31)

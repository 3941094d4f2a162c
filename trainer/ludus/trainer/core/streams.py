"""The random numbers of a run: a stream for each purpose, and keys within a stream.

    run seed, purpose --SeedSequence--> root of the stream --mix(counters)--> key
    key, turn ------------------------------------------------------mix-----> key of a request
    key of a request, position in the completion --draw_uniforms--> one random number

Streams of different purposes are independent, whatever their counters. Their roots are derived
like the children of numpy's `SeedSequence.spawn`, https://numpy.org/doc/stable/reference/random/parallel.html
A draw depends only on its key, never on other draws or their order. All random numbers of the
trainer come from this module (`tests/house/test_streams.py`).
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
"""Version of the streams. A run cannot resume under another version (`run/checkpoint.py`)."""


@unique
class Stream(IntEnum):
    """A purpose for which random numbers are drawn.

    The number of a purpose must never change or be reused: a different number would give different
    random numbers, and then VERSION must be increased.
    """

    INITIAL_WEIGHTS = 1
    """Initial weights of a tiny model."""
    LEARNER = 2
    """Initial value head and adapters of a learner rank."""
    WARM_START_EPISODE = 3
    """Environment seeds of the warm start. Counters: index of the environment, episode."""
    WARM_START_ANSWER = 4
    """Random answers of the warm start. Counters: index of the environment, episode."""
    WARM_START_ORDER = 5
    """Order of the episodes in the warm start's training."""
    TRAINING_EPISODE = 6
    """Environment seeds of training. Counters: index of the group, episode in the group."""
    TRAINING_SAMPLING = 7
    """Sampling in training. Counters: index of the group, episode in the group."""
    EVALUATION_SAMPLING = 8
    """Sampling in evaluations. Counters: index of the environment, seed of the episode."""
    ANSWER = 9
    """Completions for a program. Counters: its seed or worker, index of the completion."""
    REWARD_SHUFFLE = 10
    """Shuffled rewards of the control experiment. Counter: policy version."""
    TRANSCRIPT = 11
    """Choice of the groups with transcripts. Counter: index of the block of groups."""
    REWARD_MODEL = 20
    """Initial head and dropout of a reward model."""
    REWARD_MODEL_SPLIT = 21
    """Choice of the held-out comparisons."""
    REWARD_MODEL_ORDER = 22
    """Order of the comparisons. Counter: epoch."""
    SFT_SPLIT = 25
    """Choice of the held-out conversations."""
    SFT_ORDER = 26
    """Order of the conversations. Counter: epoch."""
    PROBLEM_SPLIT = 30
    """Choice of an environment's held-out problems."""
    REPLAY_BUFFER = 60
    """Choice of episodes in the replay buffer of Forge's API; runs do not use it."""

    NETWORK_WEIGHTS = 40
    """Initial weights of a network."""
    NETWORK_SAMPLING = 41
    """Actions of a network. Counters: update, block of steps."""
    NETWORK_ORDER = 42
    """Order of the steps in an update. Counters: update, pass over the steps."""
    NETWORK_EVALUATION = 43
    """Actions of a network in an evaluation. Counter: step."""
    RANDOM_ACTIONS = 44
    """Actions of the random policy that a network is compared with. Counter: step."""
    TRIAL_ACTIONS = 45
    """Random actions with which a dry run measures the lengths of episodes."""


_NUM_SEEDS = FIRST_WARM_START_SEED
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MODULUS = 2**64


def derive_key(run_seed: int, stream: Stream, *counters: int) -> int:
    """Return the 63-bit key of a stream and counters. Different counters give independent keys."""
    return mix(_derive_root(run_seed, stream), *counters)


def mix(key: int, *counters: int) -> int:
    """Return a 63-bit key from a key and counters. Different counters give independent keys.

    Each counter of up to 64 bits is mixed in by splitmix64: https://prng.di.unimi.it/splitmix64.c
    """
    state = 0
    for counter in (key, *counters):
        state = _mix_bits((state ^ counter % _MODULUS) + _GOLDEN_GAMMA)
    return state >> 1


def make_random(run_seed: int, stream: Stream, *counters: int) -> random.Random:
    """Return a generator of Python's `random` that draws from the stream."""
    return random.Random(derive_key(run_seed, stream, *counters))


def seed_torch(run_seed: int, stream: Stream, *counters: int) -> None:
    """Seed torch's generators in this process from the stream."""
    torch.manual_seed(derive_key(run_seed, stream, *counters))


@contextmanager
def use_torch_stream(run_seed: int, stream: Stream, *counters: int) -> Iterator[None]:
    """Seed torch's CPU generator within the block, and restore its state afterwards.

    torch.manual_seed is not used: for each kind of device that is not in use, it stores a call with
    a traceback, which takes longer than the update of a small network.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_key(run_seed, stream, *counters))
        yield


def derive_training_seed(run_seed: int, group_index: int, episode_index: int) -> int:
    """Return the environment seed of an episode of group `index`, below 2**30."""
    return derive_key(run_seed, Stream.TRAINING_EPISODE, group_index, episode_index) % _NUM_SEEDS


def derive_warm_start_seed(run_seed: int, environment_index: int, episode_index: int) -> int:
    """Return the environment seed of a warm-start episode, from 2**30 to 2**31 - 1.

    Seeds of evaluations start at 2**31.
    """
    key = derive_key(run_seed, Stream.WARM_START_EPISODE, environment_index, episode_index)
    return _NUM_SEEDS + key % _NUM_SEEDS


def draw_uniforms(keys: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return float32 [N] in [0, 1): the number at a position of each key's splitmix64 sequence."""
    step = np.asarray(positions, dtype=np.uint64) + np.uint64(1)
    state = np.asarray(keys, dtype=np.uint64) + step * np.uint64(_GOLDEN_GAMMA)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST_MULTIPLIER)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND_MULTIPLIER)
    state ^= state >> np.uint64(31)
    # A float32 below 1 has a precision of 24 bits.
    return (state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


@lru_cache(maxsize=256)
def _derive_root(run_seed: int, stream: Stream) -> int:
    """Return the 64-bit root of a stream.

    It is cached, because computing it takes ten times as long as mixing in a counter.
    """
    seed_sequence = np.random.SeedSequence(run_seed, spawn_key=(stream,))
    return int(seed_sequence.generate_state(1, np.uint64)[0])


def _mix_bits(bits: int) -> int:
    bits %= _MODULUS
    bits = ((bits ^ (bits >> 30)) * _FIRST_MULTIPLIER) % _MODULUS
    bits = ((bits ^ (bits >> 27)) * _SECOND_MULTIPLIER) % _MODULUS
    return bits ^ (bits >> 31)

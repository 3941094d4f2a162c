"""Tests of random streams: streams do not overlap, and draws are reproducible."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ludus.proto.config import EvalConfig
from ludus.trainer.core.streams import (
    Stream,
    derive_key,
    derive_training_seed,
    derive_warm_start_seed,
    draw_uniforms,
    make_random,
    mix,
    seed_torch,
)
from ludus.trainer.data.mixture import derive_group_seeds

RUN_SEEDS = (0, 1, 2, 2**31, 2**32, 2**63, 2**64, 2**128 + 1)


def generate_small_counters() -> Iterator[tuple[int, ...]]:
    """Yield counters with up to three components, including values at integer limits."""
    numbers = (0, 1, 2, 3, 7, 100, 2**30, 2**31, 2**32)
    for length in range(4):
        yield from itertools.product(numbers, repeat=length)


@pytest.mark.slow
def test_keys_of_different_streams_counters_and_runs_are_distinct() -> None:
    counters = list(generate_small_counters())
    keys = [
        derive_key(run_seed, stream, *numbers)
        for run_seed in RUN_SEEDS
        for stream in Stream
        for numbers in counters
    ]
    assert len(keys) == len(RUN_SEEDS) * len(Stream) * len(counters) > 70_000
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
    request_seeds = {mix(key, turn) for key in keys[: len(counters)] for turn in range(10)}
    assert len(request_seeds) == 10 * len(counters)
    assert request_seeds.isdisjoint(keys)


@pytest.mark.slow
def test_stream_draws_differ_from_draws_of_small_seeds() -> None:
    """Environments and players seed their generators with small numbers, so no key may be small."""
    predictable_draws = {random.Random(number).random() for number in range(5_000)}
    for run_seed, stream in itertools.product(range(3), Stream):
        draws = {make_random(run_seed, stream, counter).random() for counter in range(50)}
        assert draws.isdisjoint(predictable_draws)


def test_stream_ids_and_keys_do_not_change() -> None:
    """A change of these values changes the random draws and requires a new `VERSION`."""
    assert {stream.name: stream.value for stream in Stream} == {
        "INITIAL_WEIGHTS": 1,
        "LEARNER": 2,
        "WARM_START_EPISODE": 3,
        "WARM_START_ANSWER": 4,
        "WARM_START_ORDER": 5,
        "TRAINING_EPISODE": 6,
        "TRAINING_SAMPLING": 7,
        "EVALUATION_SAMPLING": 8,
        "ANSWER": 9,
        "REWARD_SHUFFLE": 10,
        "TRANSCRIPT": 11,
        "REWARD_MODEL": 20,
        "REWARD_MODEL_SPLIT": 21,
        "REWARD_MODEL_ORDER": 22,
        "SFT_SPLIT": 25,
        "SFT_ORDER": 26,
        "PROBLEM_SPLIT": 30,
        "NETWORK_WEIGHTS": 40,
        "NETWORK_SAMPLING": 41,
        "NETWORK_ORDER": 42,
        "NETWORK_EVALUATION": 43,
        "RANDOM_ACTIONS": 44,
        "TRIAL_ACTIONS": 45,
        "REPLAY_BUFFER": 60,
    }
    assert derive_key(0, Stream.TRAINING_SAMPLING, 5, 3) == 8_321_986_166_256_268_998
    assert derive_training_seed(0, 5, 0) == 715_490_776


def test_training_warm_start_and_evaluation_seeds_are_disjoint() -> None:
    counters = list(itertools.product(range(4), range(500)))
    training_seeds = {derive_training_seed(3, *numbers) for numbers in counters}
    warm_start_seeds = {derive_warm_start_seed(3, *numbers) for numbers in counters}
    assert len(training_seeds) == len(counters), "groups share a seed"
    assert len(warm_start_seeds) == len(counters), "warm-start episodes share a seed"
    assert 0 <= min(training_seeds) <= max(training_seeds) < 2**30
    assert 2**30 <= min(warm_start_seeds) <= max(warm_start_seeds) < 2**31
    assert EvalConfig().seed >= 2**31
    assert set(derive_group_seeds(3, 2, 16, shared=False)) <= training_seeds


def test_torch_draws_of_different_streams_are_disjoint() -> None:
    draws = []
    with torch.random.fork_rng():
        for stream in (Stream.INITIAL_WEIGHTS, Stream.LEARNER, Stream.INITIAL_WEIGHTS):
            seed_torch(4, stream)
            draws.append(torch.rand(8))
    assert torch.equal(draws[0], draws[2])
    assert not torch.isin(draws[0], draws[1]).any()


@pytest.mark.slow
def test_different_counters_give_different_seeds() -> None:
    seeds = {
        mix(run, group, episode, turn)
        for run in range(4)
        for group in range(50)
        for episode in range(16)
        for turn in range(8)
    }
    assert len(seeds) == 4 * 50 * 16 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 2**32 for seed in seeds}) > 0.999 * len(seeds), (
        "seeds collide when truncated to 32 bits"
    )
    assert mix(1, 2) != mix(2, 1)
    assert mix(2**70, 3) >= 0


def test_uniform_number_depends_only_on_seed_and_position() -> None:
    seeds = [mix(1, number) for number in range(100)]
    batch_uniforms = draw_uniforms(seeds, [3] * 100)
    single_uniforms = np.concatenate([draw_uniforms([seed], [3]) for seed in seeds])
    assert np.array_equal(batch_uniforms, single_uniforms)
    assert not np.array_equal(batch_uniforms, draw_uniforms(seeds, [4] * 100))


def test_draws_are_uniform_and_uncorrelated_between_positions() -> None:
    draws = np.stack([draw_uniforms(list(range(20_000)), [p] * 20_000) for p in range(3)])
    assert draws.dtype == np.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    chi_square = ((counts - 3000) ** 2 / 3000).sum()
    assert chi_square < 43.8, (
        "chi-square exceeds the 0.1 % critical value for 19 degrees of freedom"
    )
    assert np.abs(np.corrcoef(draws) - np.eye(3)).max() < 0.03

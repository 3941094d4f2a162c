"""Advantages of all algorithms, compared with sums written from their definitions."""

from __future__ import annotations

import math
import random
import statistics
from itertools import chain

import pytest
import torch

from ludus.trainer.algorithms.advantages import (
    discounted_returns,
    gae,
    group_advantages,
    moments,
    stream_gae,
    turn_advantages,
    whiten,
)

NUM_CASES = 200
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "float64"])

Rewards = list[float | None]


def assert_near(actual: list[float], expected: list[float], dtype: torch.dtype) -> None:
    scale = max([1.0, *map(abs, expected)])
    assert actual == pytest.approx(expected, abs=TOLERANCES[dtype] * scale, rel=0)


def draw_rewards(generator: random.Random, size: int) -> Rewards:
    """Return rewards on a coarse grid, so that some groups have equal rewards; None is void."""
    values = generator.choice([[1.0], [0.0, 1.0], [0.0, 0.5, 1.0, -3.0]])
    return [None if generator.random() < 0.15 else generator.choice(values) for _ in range(size)]


def compute_group(rewards: Rewards, baseline: str, scale: str, all_rewards: Rewards) -> list[float]:
    """Return the advantages of one group."""
    scored = [reward for reward in rewards if reward is not None]
    if baseline == "none":
        return [0.0 if reward is None else reward for reward in rewards]
    if len(set(scored)) < 2:
        return [0.0] * len(rewards)
    divisor = 1.0
    if scale != "none":
        sample = scored if scale == "group" else [r for r in all_rewards if r is not None]
        divisor = statistics.stdev(sample) + 1e-4
    advantages = []
    for index, reward in enumerate(rewards):
        if reward is None:
            advantages.append(0.0)
            continue
        other_rewards = [r for i, r in enumerate(rewards) if r is not None and i != index]
        subtracted = statistics.fmean(other_rewards if baseline == "leave_one_out" else scored)
        advantages.append((reward - subtracted) / divisor)
    return advantages


def to_tensor(rows: list[Rewards], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(
        [[math.nan if value is None else value for value in row] for row in rows], dtype=dtype
    )


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_group_advantages_equal_the_definition(
    baseline: str, scale: str, dtype: torch.dtype
) -> None:
    for seed in range(NUM_CASES):
        generator = random.Random(seed)
        size = generator.randint(1, 6)
        groups = [draw_rewards(generator, size) for _ in range(generator.randint(1, 5))]
        all_rewards = [reward for group in groups for reward in group]
        actual = group_advantages(to_tensor(groups, dtype), baseline, scale)  # type: ignore[arg-type]
        expected = [compute_group(group, baseline, scale, all_rewards) for group in groups]
        assert_near(actual.flatten().tolist(), list(chain.from_iterable(expected)), dtype)


@pytest.mark.slow
@DTYPES
def test_turn_advantages_equal_the_definition(dtype: torch.dtype) -> None:
    for seed in range(NUM_CASES):
        generator = random.Random(seed)
        size, num_turns, gamma = generator.randint(1, 5), generator.randint(1, 4), 0.9
        episodes: list[Rewards] = []
        for _ in range(size):
            length = generator.choice([0, *range(1, num_turns + 1)])
            rewards: Rewards = [generator.choice([0.0, 1.0]) for _ in range(length)]
            episodes.append(rewards + [None] * (num_turns - length))
        actual = turn_advantages(to_tensor(episodes, dtype)[None], gamma=gamma)[0]
        for turn in range(num_turns):
            returns: Rewards = [
                None
                if episode[turn] is None
                else sum(gamma**k * (reward or 0.0) for k, reward in enumerate(episode[turn:]))
                for episode in episodes
            ]
            scored = [value for value in returns if value is not None]
            mean = statistics.fmean(scored) if len(scored) > 1 else 0.0
            expected = [
                0.0 if value is None or len(scored) < 2 else value - mean for value in returns
            ]
            assert_near(actual[:, turn].tolist(), expected, dtype)


def compute_gae(
    rewards: list[float], values: list[float], last_value: float, gamma: float, lam: float
) -> list[float]:
    """Return A_t = sum over k of (gamma lam)^k (r_t+k + gamma V_t+k+1 - V_t+k)."""
    next_values = [*values[1:], last_value]
    deltas = [
        reward + gamma * next_value - value
        for reward, next_value, value in zip(rewards, next_values, values, strict=True)
    ]
    return [
        math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[start:]))
        for start in range(len(deltas))
    ]


@pytest.mark.slow
@DTYPES
def test_gae_equals_the_sum_of_its_definition(dtype: torch.dtype) -> None:
    for seed in range(NUM_CASES):
        generator = random.Random(seed)
        num_columns = generator.randint(1, 12)
        gamma, lam = generator.choice([1.0, 0.97, 0.5]), generator.choice([1.0, 0.9, 0.0])
        mask = [generator.random() < 0.6 for _ in range(num_columns)]
        mask[0] = True  # a reward before the first action belongs to no action
        rewards = [generator.gauss(0, 1) for _ in range(num_columns)]
        values = [generator.gauss(0, 1) for _ in range(num_columns)]
        is_terminated, bootstrap = generator.random() < 0.5, generator.gauss(0, 5)
        actual = gae(
            torch.tensor([rewards], dtype=dtype),
            torch.tensor([values], dtype=dtype),
            torch.tensor([mask]),
            torch.tensor([is_terminated]),
            torch.tensor([bootstrap], dtype=dtype),
            gamma,
            lam,
        )[0]
        actions = [index for index, is_action in enumerate(mask) if is_action]
        ends = [*actions[1:], num_columns]
        expected = compute_gae(
            [sum(rewards[start:end]) for start, end in zip(actions, ends, strict=True)],
            [values[index] for index in actions],
            0.0 if is_terminated else bootstrap,
            gamma,
            lam,
        )
        assert_near(actual[actions].tolist(), expected, dtype)
        assert not actual[~torch.tensor(mask)].any()


@pytest.mark.slow
@DTYPES
def test_stream_gae_equals_the_sums_of_its_episodes(dtype: torch.dtype) -> None:
    """Episodes end by the rules or by a limit, whose last observation has a value."""
    for seed in range(NUM_CASES):
        generator, num_steps = random.Random(seed), 12
        gamma, lam = generator.choice([1.0, 0.99]), generator.choice([1.0, 0.95])
        rewards = [generator.gauss(0, 1) for _ in range(num_steps)]
        values = [generator.gauss(0, 1) for _ in range(num_steps)]
        ends = sorted({*generator.sample(range(num_steps), 3), num_steps - 1})
        next_values, is_last = [*values[1:], 0.0], [False] * num_steps
        expected, start = [], 0
        for end in ends:
            last_value = generator.choice([0.0, generator.gauss(0, 5)])
            next_values[end] = last_value
            # The stream continues after its last step, as if that step were truncated.
            is_last[end] = end < num_steps - 1 or generator.random() < 0.5
            episode = slice(start, end + 1)
            expected += compute_gae(rewards[episode], values[episode], last_value, gamma, lam)
            start = end + 1
        columns = [
            torch.tensor([column], dtype=dtype).T for column in (rewards, values, next_values)
        ]
        actual = stream_gae(*columns, torch.tensor([is_last]).T, gamma, lam)
        assert_near(actual.flatten().tolist(), expected, dtype)


@pytest.mark.slow
@DTYPES
def test_whitened_returns_equal_the_definition(dtype: torch.dtype) -> None:
    """Moments of micro-batches are summed, and some micro-batches are empty."""
    for seed in range(NUM_CASES):
        generator, gamma = random.Random(seed), random.Random(seed).choice([1.0, 0.9])
        lengths = [generator.randint(0, 5) for _ in range(6)] + [3]
        rows = [[generator.gauss(3, 2) for _ in range(length)] for length in lengths]
        padded = [row + [math.nan] * (5 - len(row)) for row in rows]
        mask = torch.arange(5) < torch.tensor(lengths)[:, None]
        rewards = torch.where(mask, torch.tensor(padded, dtype=dtype), 0.0)
        returns = discounted_returns(rewards, mask, gamma)
        parts = [torch.arange(7)[part::4] for part in range(4)]
        parts[1] = torch.arange(0)
        parts[0] = torch.cat([torch.arange(7)[0::4], torch.arange(7)[1::4]])
        total_moments = torch.stack([moments(returns[ids], mask[ids]) for ids in parts]).sum(0)
        actual = whiten(returns, mask, total_moments)
        expected_returns = [
            [
                math.fsum(gamma**k * reward for k, reward in enumerate(row[start:]))
                for start in range(len(row))
            ]
            for row in rows
        ]
        numbers = list(chain.from_iterable(expected_returns))
        mean, deviation = statistics.fmean(numbers), statistics.stdev(numbers)
        expected = [(number - mean) / (deviation + 1e-8) for number in numbers]
        assert_near(actual[mask].tolist(), expected, dtype)

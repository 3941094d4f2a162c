"""Random numbers from counters: what they promise, and that a replayed group samples the same."""

from __future__ import annotations

import numpy as np

from ludus.trainer.rollout.seeds import mix, uniforms


def test_counters_that_differ_anywhere_give_other_seeds() -> None:
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
        "some generators take 32 bits"
    )
    assert mix(1, 2) != mix(2, 1)
    assert mix(2**70, 3) >= 0


def test_a_number_follows_from_its_seed_and_position_alone() -> None:
    seeds = [mix(1, number) for number in range(100)]
    together = uniforms(seeds, [3] * 100)
    alone = np.concatenate([uniforms([seed], [3]) for seed in seeds])
    assert np.array_equal(together, alone)
    assert not np.array_equal(together, uniforms(seeds, [4] * 100))


def test_numbers_are_uniform_and_unrelated_from_position_to_position() -> None:
    numbers = np.stack([uniforms(list(range(20_000)), [p] * 20_000) for p in range(3)])
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_square = ((counts - 3000) ** 2 / 3000).sum()
    assert chi_square < 43.8, "exceeded once in a thousand draws with 19 degrees of freedom"
    assert np.abs(np.corrcoef(numbers) - np.eye(3)).max() < 0.03

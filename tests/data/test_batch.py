"""Groups become a batch: advantages per group, equal sequences once, lost episodes never."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ludus.proto.config import GrpoConfig
from ludus.trainer.data.batch import make_batch, shuffle_rewards
from ludus.trainer.learner.micro_batches import micro_batches, split_samples
from ludus.trainer.types import RolloutGroup
from tests.data.rollouts import make_group, make_rollout
from tests.learner.tiny_policy import make_batch as make_ragged_batch


def test_the_advantage_is_the_reward_above_the_mean_of_its_own_group() -> None:
    batch = make_batch([make_group(1, -1, -1, -1), make_group(1, 1, 0, 0)], GrpoConfig())
    assert batch.advantages.tolist() == [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, -0.5, -0.5]


def test_a_lost_episode_is_in_no_baseline_and_in_no_batch() -> None:
    with_lost = make_batch([make_group(1, -1, None)], GrpoConfig())
    without = make_batch([make_group(1, -1)], GrpoConfig())
    assert with_lost.num_samples == 2
    assert with_lost.advantages.tolist() == without.advantages.tolist()


def test_equal_episodes_share_a_sequence_and_keep_their_own_advantage() -> None:
    twins = RolloutGroup(0, "coins", (make_rollout(1.0), make_rollout(-1.0), make_rollout(1.0)))
    batch = make_batch([twins], GrpoConfig())
    assert len(batch.sequences) == 1
    assert batch.sequence_of_sample.tolist() == [0, 0, 0]
    assert batch.advantages == pytest.approx([2 / 3, -4 / 3, 2 / 3])
    assert batch.num_loss_tokens == 6


def test_equal_tokens_with_different_masks_are_not_shared() -> None:
    one = make_rollout(1.0)
    other = replace(make_rollout(-1.0), loss_mask=[False, False, False, True])
    batch = make_batch([RolloutGroup(0, "coins", (one, other))], GrpoConfig())
    assert len(batch.sequences) == 2


def test_shuffled_rewards_are_the_same_rewards_dealt_to_others() -> None:
    groups = [make_group(1, -1, None, index=index) for index in range(20)]
    shuffled = shuffle_rewards(groups, seed=3)
    rewards = [[r.reward for g in gs for r in g.rollouts] for gs in (groups, shuffled)]
    assert Counter(rewards[0]) == Counter(rewards[1])
    assert rewards[0] != rewards[1]
    assert all(g.rollouts[2].reward is None for g in shuffled)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [8, 40, 10_000])
def test_every_sample_is_on_exactly_one_rank_in_equally_many_pieces(
    num_ranks: int, max_tokens: int
) -> None:
    batch = make_ragged_batch(num_samples=25)
    for samples in split_samples(batch, 2):
        pieces = [
            micro_batches(batch, samples, max_tokens=max_tokens, rank=rank, num_ranks=num_ranks)
            for rank in range(num_ranks)
        ]
        assert len({len(of_rank) for of_rank in pieces}) == 1
        advantages = [a for of_rank in pieces for p in of_rank for a in p.advantages.tolist()]
        assert sorted(advantages) == sorted(batch.advantages[samples].tolist())


def test_a_piece_stays_within_its_tokens_unless_one_sequence_alone_exceeds_them() -> None:
    batch = make_ragged_batch(num_samples=25)
    samples = np.arange(25)
    pieces = micro_batches(batch, samples, max_tokens=40, rank=0, num_ranks=1)
    assert len(pieces) > 3
    assert all(p.num_padded_tokens <= 40 or len(p.sequence_ids) == 1 for p in pieces)

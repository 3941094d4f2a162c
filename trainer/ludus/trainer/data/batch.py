"""Groups to a batch: advantages per sample, equal token sequences shared."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from ludus.proto.config import GrpoConfig
from ludus.trainer.algorithms.advantages import group_advantages
from ludus.trainer.types import Batch, RolloutGroup, TrainingSample


def make_batch(groups: Sequence[RolloutGroup], algorithm: GrpoConfig) -> Batch:
    """The batch of all scored episodes of `groups`."""
    rewards = torch.tensor(
        [[float("nan") if r is None else r for r in group.rewards] for group in groups],
        dtype=torch.float32,
    )
    advantages = group_advantages(rewards, algorithm.baseline, algorithm.scale)
    return collate(list(_samples(groups, advantages.tolist())))


def collate(samples: Sequence[TrainingSample]) -> Batch:
    """The batch of `samples`; those of equal tokens and mask share one sequence."""
    rows: dict[tuple[tuple[int, ...], tuple[bool, ...]], int] = {}
    sequence_of_sample = [
        rows.setdefault((tuple(s.token_ids), tuple(s.loss_mask)), len(rows)) for s in samples
    ]
    return Batch(
        sequences=[np.array(token_ids, dtype=np.int64) for token_ids, _ in rows],
        sequence_of_sample=np.array(sequence_of_sample, dtype=np.int64),
        loss_masks=[np.array(mask, dtype=bool) for _, mask in rows],
        rollout_logprobs=[np.array(s.rollout_logprobs, dtype=np.float32) for s in samples],
        advantages=np.array([s.advantage for s in samples], dtype=np.float32),
    )


def shuffle_rewards(groups: Sequence[RolloutGroup], seed: int) -> list[RolloutGroup]:
    """The groups with all their rewards dealt out at random: the negative control.

    The rewards keep their distribution, so everything but learning stays the same.
    """
    rewards = [r.reward for group in groups for r in group.rollouts if r.reward is not None]
    random.Random(seed).shuffle(rewards)
    dealt = iter(rewards)
    return [
        replace(
            group,
            rollouts=tuple(
                rollout if rollout.reward is None else replace(rollout, reward=next(dealt))
                for rollout in group.rollouts
            ),
        )
        for group in groups
    ]


def _samples(
    groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]]
) -> Iterator[TrainingSample]:
    for group, row in zip(groups, advantages, strict=True):
        for rollout, advantage in zip(group.rollouts, row, strict=True):
            if rollout.reward is None:
                continue
            yield TrainingSample(rollout.token_ids, rollout.loss_mask, rollout.logprobs, advantage)

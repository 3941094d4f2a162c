"""Groups to a batch: advantages per sample, equal token sequences shared."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from ludus.proto.config import AlgorithmConfig, GrpoConfig
from ludus.trainer.algorithms.advantages import group_advantages
from ludus.trainer.types import (
    Batch,
    RolloutGroup,
    RolloutStatus,
    TokenSequence,
    TrainingSample,
)


def make_batch(groups: Sequence[RolloutGroup], algorithm: AlgorithmConfig) -> Batch:
    """The batch of all scored episodes of `groups`."""
    rewards = torch.tensor(
        [[float("nan") if r is None else r for r in group.rewards] for group in groups],
        dtype=torch.float32,
    )
    assert isinstance(algorithm, GrpoConfig)
    assert algorithm.baseline != "none"
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
        advantages=[np.array(s.advantages, dtype=np.float32) for s in samples],
        rewards=[np.array(s.rewards, dtype=np.float32) for s in samples],
        terminated=np.array([s.terminated for s in samples], dtype=bool),
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
            for sequence in rollout.sequences:
                yield TrainingSample(
                    sequence.token_ids,
                    sequence.loss_mask,
                    sequence.logprobs,
                    [advantage * sampled for sampled in sequence.loss_mask],
                    _rewards(sequence),
                    terminated=rollout.status is not RolloutStatus.TRUNCATED,
                )


def _rewards(sequence: TokenSequence) -> list[float]:
    """[T] each turn's reward on its last token."""
    rewards = [0.0] * len(sequence.token_ids)
    for turn in sequence.turns:
        rewards[turn.end - 1] = turn.reward
    return rewards

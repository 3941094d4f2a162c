"""Cuts a batch into pieces that fit through the model, the same number on every rank.

The loss divides by denominators of the whole optimizer step, so it does not depend on where
the cuts are.

Shapes: U = sequences of a piece, N = samples of a piece, T = its longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ludus.trainer.types import Batch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What goes through the model at once."""

    token_ids: Tensor
    """int64 [U, T], padded on the right."""
    sampled: Tensor
    """bool [U, T]"""
    row_of_sample: Tensor
    """int64 [N] row of `token_ids` for each sample."""
    rollout_logprobs: Tensor
    """float32 [N, T]"""
    advantages: Tensor
    """float32 [N, T], 0 where not sampled."""
    sequence_ids: np.ndarray
    """int64 [U] rows of Batch.sequences; empty in a piece that only keeps ranks in step."""

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that the model computes."""
        return self.token_ids.numel()


def split_samples(batch: Batch, num_minibatches: int) -> list[np.ndarray]:
    """The samples of each minibatch, as rows of the batch; neighbours stay together.

    Samples of one group stand beside each other and share sequences.
    """
    return np.array_split(np.arange(batch.num_samples), num_minibatches)


def micro_batches(
    batch: Batch, samples: np.ndarray, *, max_tokens: int, rank: int, num_ranks: int
) -> list[MicroBatch]:
    """The pieces of `samples` that `rank` computes; every rank gets equally many."""
    plans = [
        plan_pieces(batch, _sequences_of_rank(batch, samples, r, num_ranks), max_tokens)
        for r in range(num_ranks)
    ]
    num_pieces = max(len(plan) for plan in plans)
    pieces = list(_make_pieces(batch, samples, plans[rank]))
    return pieces + [_empty_piece()] * (num_pieces - len(pieces))


def plan_pieces(batch: Batch, sequence_ids: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Sequences by length, cut so that rows times longest stays within `max_tokens`."""
    pieces: list[list[int]] = []
    for sequence_id in sequence_ids:
        length = len(batch.sequences[sequence_id])
        if pieces and (len(pieces[-1]) + 1) * length <= max_tokens:
            pieces[-1].append(int(sequence_id))
        else:
            pieces.append([int(sequence_id)])
    return [np.array(piece) for piece in pieces]


def _sequences_of_rank(batch: Batch, samples: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """Every num_ranks-th sequence in order of length: equal work for all."""
    sequence_ids = np.unique(batch.sequence_of_sample[samples])
    lengths = np.array([len(batch.sequences[i]) for i in sequence_ids], dtype=np.int64)
    return sequence_ids[np.argsort(lengths, kind="stable")][rank::num_ranks]


def _make_pieces(
    batch: Batch, samples: np.ndarray, plan: Sequence[np.ndarray]
) -> Iterator[MicroBatch]:
    owner = batch.sequence_of_sample[samples]
    for sequence_ids in plan:
        mine = samples[np.isin(owner, sequence_ids)]
        longest = max(len(batch.sequences[i]) for i in sequence_ids)
        row = {sequence_id: index for index, sequence_id in enumerate(sequence_ids.tolist())}
        rows = [row[i] for i in batch.sequence_of_sample[mine].tolist()]
        yield MicroBatch(
            token_ids=_pad([batch.sequences[i] for i in sequence_ids], longest, np.int64),
            sampled=_pad([batch.loss_masks[i] for i in sequence_ids], longest, np.bool_),
            row_of_sample=torch.tensor(rows),
            rollout_logprobs=_pad([batch.rollout_logprobs[i] for i in mine], longest, np.float32),
            advantages=_pad([batch.advantages[i] for i in mine], longest, np.float32),
            sequence_ids=sequence_ids,
        )


def _pad(arrays: Sequence[np.ndarray], length: int, dtype: type[np.generic]) -> Tensor:
    padded = np.zeros((len(arrays), length), dtype=dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(padded)


def _empty_piece() -> MicroBatch:
    """One token, nothing sampled: a rank with less work joins the others' collectives with it."""
    return MicroBatch(
        token_ids=torch.zeros(1, 2, dtype=torch.int64),
        sampled=torch.zeros(1, 2, dtype=torch.bool),
        row_of_sample=torch.zeros(0, dtype=torch.int64),
        rollout_logprobs=torch.zeros(0, 2),
        advantages=torch.zeros(0, 2),
        sequence_ids=np.zeros(0, dtype=np.int64),
    )

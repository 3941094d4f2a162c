"""Split of a batch into micro-batches that fit in the model, the same number on every rank.

    sequences --packing--> rows --by cost--> ranks --by tokens--> micro-batches

The loss divides by denominators of the whole optimizer step, so it does not depend on the split.
A micro-batch has loss inputs of sampled tokens only, because only these are part of the loss.

Shapes: R = rows of a micro-batch, L = length of the longest row, P = positions before a sampled
token, E = distinct sampled tokens (with a different token, prefix or choice of allowed tokens), N =
samples, S = sampled tokens of the longest sample, K = largest number of allowed tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.trainer.core.ragged import RaggedArray
from ludus.trainer.core.types import Batch, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.packing import Ints, Layout, RowCosts, cut_rows, lay_out_sequences

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


class PackedRows(NamedTuple):
    """Rows that go through the model at once, with the positions whose outputs are needed."""

    token_ids: Tensor
    """int64 [R, L]"""
    depths: Tensor
    """int64 [R, L] position of each token in its sequences."""
    ends: Tensor | None
    """int64 [R, L] see `packing`; None if each row is one sequence with causal attention."""
    positions: Tensor
    """int64 [P] row * L + column of each token that precedes a sampled token."""
    target_ids: Tensor
    """int64 [E] the sampled tokens."""
    position_of_target: Tensor
    """int64 [E] index into `positions` of the token that precedes each target."""
    last_positions: Tensor
    """int64 [N] row * L + column of each sample's last token."""
    allowed_ids: Tensor | None = None
    """int64 [E, K] tokens that could be sampled instead of each target, padded with -1; None if all
    tokens could be sampled."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model computes, including padding."""
        return self.token_ids.numel()


class MicroBatch(NamedTuple):
    """Packed rows and the samples that they contain."""

    rows: PackedRows
    target_of_token: Tensor
    """int64 [N, S] index of each sampled token among the E targets."""
    mask: Tensor
    """bool [N, S] False after a sample's last sampled token."""
    rollout_logprobs: Tensor
    """float32 [N, S]"""
    advantages: Tensor
    """float32 [N, S]"""
    rewards: Tensor
    """float32 [N, S]"""
    terminated: Tensor
    """bool [N]"""
    sample_ids: Tensor
    """int64 [N] index of each sample in the batch."""

    def gather_samples(self, values: Tensor) -> Tensor:
        """Gather `values` [E] into one row per sample; return [N, S]."""
        return values.index_select(0, self.target_of_token.flatten()).view(self.mask.shape)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy of the micro-batch on `device`."""
        rows = PackedRows._make(
            None if tensor is None else tensor.to(device) for tensor in self.rows
        )
        return MicroBatch(rows, *(tensor.to(device) for tensor in self[1:]))


@dataclass(frozen=True, slots=True)
class MicroBatchConfig:
    """Settings of the split into micro-batches."""

    max_tokens: int
    """Maximum number of tokens of a micro-batch, including padding."""
    costs: RowCosts
    """Costs by which rows are chosen, and assigned to ranks."""
    rank: int = 0
    num_ranks: int = 1
    packs_trees: bool = True
    """True if a row can contain several sequences, with common prefixes computed once."""


def split_samples(batch: Batch, num_minibatches: int) -> list[Ints]:
    """Return the sample indices of each minibatch.

    Adjacent samples stay together, because samples of one group are adjacent and share prefixes.
    """
    return np.array_split(np.arange(batch.num_samples), num_minibatches)


def make_micro_batches(
    batch: Batch, sample_ids: Ints, config: MicroBatchConfig
) -> list[MicroBatch]:
    """Return one rank's micro-batches of these samples; all ranks get the same number."""
    num_ranks, max_tokens = config.num_ranks, config.max_tokens
    layout = lay_out_sequences(
        batch.sequences,
        np.unique(batch.sequence_of_sample[sample_ids]),
        costs=config.costs if config.packs_trees else None,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
    )
    lengths = np.diff(layout.row_starts)
    rank_rows = _assign_rows(lengths, config)
    rank_slices = [cut_rows(lengths[rows], max_tokens) for rows in rank_rows]
    tokens = _gather_sampled_tokens(batch, sample_ids)
    micro_batches = [
        _make_micro_batch(batch, tokens, layout, rank_rows[config.rank][row_slice])
        for row_slice in rank_slices[config.rank]
    ]
    num_missing = max(map(len, rank_slices)) - len(micro_batches)
    return micro_batches + [_make_empty_micro_batch()] * num_missing


def _assign_rows(lengths: Ints, config: MicroBatchConfig) -> list[Ints]:
    """Return the indices of each rank's rows, sorted by length.

    Each row goes to the rank with the lowest cost so far, the longest row first (the LPT rule).
    """
    rank_costs = np.zeros(config.num_ranks)
    ranks = np.zeros(len(lengths), dtype=np.int64)
    sorted_rows = np.argsort(lengths, kind="stable")
    for row in sorted_rows[::-1]:
        ranks[row] = rank_costs.argmin()
        rank_costs[ranks[row]] += config.costs.compute_row(int(lengths[row]))
    return [sorted_rows[ranks[sorted_rows] == rank] for rank in range(config.num_ranks)]


def pack_one_micro_batch(samples: Sequence[TrainingSample]) -> MicroBatch:
    """Return all `samples` in order as one micro-batch, each sequence in a separate row."""
    batch = collate(samples)
    sequence_ids = np.arange(len(batch.sequences))
    layout = lay_out_sequences(
        batch.sequences, sequence_ids, costs=None, max_tokens=sys.maxsize, num_ranks=1
    )
    tokens = _gather_sampled_tokens(batch, np.arange(batch.num_samples))
    return _make_micro_batch(batch, tokens, layout, np.arange(len(sequence_ids)))


def make_unscored_sample(token_ids: list[int], loss_mask: list[bool]) -> TrainingSample:
    """Return a sample whose log-probs, advantages and rewards are all zero."""
    zeros = [0.0] * len(token_ids)
    return TrainingSample(token_ids, loss_mask, zeros, zeros, zeros, terminated=True)


@dataclass(frozen=True, slots=True)
class _SampledTokens:
    """Loss inputs of samples, concatenated over their sampled tokens."""

    sample_ids: Ints
    """[N] indices of the samples in the batch."""
    starts: Ints
    """[N] start of each sample in the arrays below."""
    rollout_logprobs: Floats
    advantages: Floats
    rewards: Floats
    allowed_ids: _AllowedIds | None


@dataclass(frozen=True, slots=True)
class _AllowedIds:
    """The tokens that could be sampled in place of each sampled token of a batch."""

    rows: RaggedArray
    """int32 arrays, a row for each sampled token of all U sequences."""
    starts: Ints
    """[U] first row of each sequence."""
    counts: Ints
    """[U] number of rows of each sequence."""

    def select(self, sequence_ids: Ints) -> list[NDArray[np.int32]]:
        """Return the arrays of all sampled tokens of these sequences, in order."""
        return [
            self.rows[self.starts[sequence_id] + index]
            for sequence_id in sequence_ids
            for index in range(self.counts[sequence_id])
        ]


def _gather_sampled_tokens(batch: Batch, sample_ids: Ints) -> _SampledTokens:
    sequence_ids, all_counts = batch.sequence_of_sample[sample_ids], batch.num_sampled_tokens
    counts, allowed_ids = all_counts[sequence_ids], None
    if batch.allowed_ids is not None:
        starts = np.cumsum(all_counts) - all_counts
        allowed_ids = _AllowedIds(batch.allowed_ids, starts, all_counts)
    is_sampled = batch.loss_masks.concatenate_rows(sequence_ids)

    def select(values: RaggedArray) -> Floats:
        # The zero at the end is the value of all padding.
        return np.append(values.concatenate_rows(sample_ids)[is_sampled], np.float32(0))

    return _SampledTokens(
        sample_ids,
        np.cumsum(counts) - counts,
        select(batch.rollout_logprobs),
        select(batch.advantages),
        select(batch.rewards),
        allowed_ids,
    )


def _make_micro_batch(
    batch: Batch, sampled_tokens: _SampledTokens, layout: Layout, rows: Ints
) -> MicroBatch:
    leaf_ids = np.flatnonzero(np.isin(layout.row_of_sequence, rows))
    sequence_ids = layout.sequence_ids[leaf_ids]
    leaf_of_sequence = np.full(len(batch.sequences), -1)
    leaf_of_sequence[sequence_ids] = np.arange(len(leaf_ids))
    leaf_of_sample = leaf_of_sequence[batch.sequence_of_sample[sampled_tokens.sample_ids]]
    samples = np.flatnonzero(leaf_of_sample >= 0)
    leaf_of_sample = leaf_of_sample[samples]

    lengths = batch.loss_masks.lengths[sequence_ids]
    columns = np.arange(lengths.max())
    is_sampled = np.zeros((len(leaf_ids), len(columns)), dtype=np.bool_)
    is_sampled[columns < lengths[:, None]] = batch.loss_masks.concatenate_rows(sequence_ids)
    nodes = layout.nodes[leaf_ids, : len(columns)]
    last_nodes = nodes[np.arange(len(leaf_ids)), lengths - 1][leaf_of_sample]
    allowed_ids = None
    if sampled_tokens.allowed_ids is not None:
        allowed_ids = sampled_tokens.allowed_ids.select(sequence_ids)
    packed_rows, target_of_token = _pack_rows(
        layout, rows, nodes, is_sampled, last_nodes, allowed_ids
    )

    counts = is_sampled.sum(axis=1)
    columns = np.arange(max(1, counts.max()))
    targets = np.zeros((len(leaf_ids), len(columns)), dtype=np.int64)
    targets[columns < counts[:, None]] = target_of_token
    mask = columns < counts[leaf_of_sample][:, None]
    token_indices = np.where(
        mask, sampled_tokens.starts[samples][:, None] + columns, len(sampled_tokens.rewards) - 1
    )
    return MicroBatch(
        rows=packed_rows,
        target_of_token=torch.from_numpy(targets[leaf_of_sample]),
        mask=torch.from_numpy(mask),
        rollout_logprobs=torch.from_numpy(sampled_tokens.rollout_logprobs[token_indices]),
        advantages=torch.from_numpy(sampled_tokens.advantages[token_indices]),
        rewards=torch.from_numpy(sampled_tokens.rewards[token_indices]),
        terminated=torch.from_numpy(batch.terminated[sampled_tokens.sample_ids[samples]]),
        sample_ids=torch.from_numpy(sampled_tokens.sample_ids[samples]),
    )


def _pack_rows(
    layout: Layout,
    rows: Ints,
    nodes: Ints,
    is_sampled: Bools,
    last_nodes: Ints,
    allowed_ids: Sequence[NDArray[np.int32]] | None,
) -> tuple[PackedRows, Ints]:
    """Convert these rows to tensors; also return the index of each sampled token's target.

    `nodes` [leaves, T] has the node of each token of the sequences in these rows, `is_sampled` has
    the same shape, and `last_nodes` [N] has the node of each sample's last token. `allowed_ids` has
    the tokens that were allowed in place of each sampled token; None if all tokens were allowed.
    """
    starts, lengths = layout.row_starts[rows], np.diff(layout.row_starts)[rows]
    columns = np.arange(lengths.max())
    is_token = columns < lengths[:, None]
    node_ids = np.where(is_token, starts[:, None] + columns, 0)
    position_of_node = np.zeros(len(layout.token_ids), dtype=np.int64)
    position_of_node[node_ids[is_token]] = np.flatnonzero(is_token)

    sampled_nodes = nodes[is_sampled]
    target_keys = sampled_nodes
    if allowed_ids is not None:
        target_keys = sampled_nodes * len(allowed_ids) + _number_arrays(allowed_ids)
    _, first_index, target_of_token = np.unique(target_keys, return_index=True, return_inverse=True)
    previous_nodes = nodes[:, :-1][is_sampled[:, 1:]][first_index]
    positions, position_of_target = np.unique(position_of_node[previous_nodes], return_inverse=True)
    sequences_per_row = np.bincount(layout.row_of_sequence, minlength=rows.max() + 1)[rows]
    # Padding attends only to padding. A token that attends to nothing would make softmax NaN.
    ends = np.where(is_token, layout.ends[node_ids] - starts[:, None], len(columns))
    packed_rows = PackedRows(
        token_ids=torch.from_numpy(np.where(is_token, layout.token_ids[node_ids], 0)),
        depths=torch.from_numpy(np.where(is_token, layout.depths[node_ids], 0)),
        ends=None if sequences_per_row.max() == 1 else torch.from_numpy(ends),
        positions=torch.from_numpy(positions),
        target_ids=torch.from_numpy(layout.token_ids[sampled_nodes[first_index]]),
        position_of_target=torch.from_numpy(position_of_target),
        last_positions=torch.from_numpy(position_of_node[last_nodes]),
        allowed_ids=None if allowed_ids is None else _pad([allowed_ids[i] for i in first_index]),
    )
    return packed_rows, target_of_token


def _number_arrays(arrays: Sequence[NDArray[np.int32]]) -> Ints:
    """Return a number for each array, less than their count; equal arrays have equal numbers."""
    number_by_content: dict[bytes, int] = {}
    numbers = [
        number_by_content.setdefault(array.tobytes(), len(number_by_content)) for array in arrays
    ]
    return np.array(numbers, dtype=np.int64)


def _pad(arrays: Sequence[NDArray[np.int32]]) -> Tensor:
    """Return the arrays as rows of one int64 tensor, padded with -1."""
    padded_rows = np.full((len(arrays), max(map(len, arrays))), -1, dtype=np.int64)
    for row, array in zip(padded_rows, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(padded_rows)


def _make_empty_micro_batch() -> MicroBatch:
    """Return a micro-batch of one token without a sample, for a rank that has no more samples."""
    zero_int = torch.zeros(1, dtype=torch.int64)
    no_ints, no_floats = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1)
    return MicroBatch(
        rows=PackedRows(
            zero_int[None], zero_int[None], None, zero_int, zero_int, zero_int, no_ints
        ),
        target_of_token=no_ints[:, None],
        mask=no_floats.bool(),
        rollout_logprobs=no_floats,
        advantages=no_floats,
        rewards=no_floats,
        terminated=no_ints.bool(),
        sample_ids=no_ints,
    )

"""Cuts a batch into micro-batches that fit through the model, as many on every rank.

    sequences --packing--> rows --by length--> ranks --by tokens--> micro-batches

The loss divides by denominators of the whole optimizer step, so it does not depend on where
the cuts are. Only sampled tokens are in the loss, so a micro-batch says nothing of the others.

Shapes: R = rows of a micro-batch, L = its longest row, P = positions before a sampled token, E =
sampled tokens that differ in token or prefix, N = samples, S = sampled tokens of the longest
sample.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.trainer.core.ragged import Ragged
from ludus.trainer.core.types import Batch, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.packing import Ints, Layout, RowCosts, cut_rows, lay_out

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
_T = TypeVar("_T", bound=Any)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What goes through the model at once, and which of its answers are wanted."""

    token_ids: Tensor
    """int64 [R, L]"""
    depths: Tensor
    """int64 [R, L] position of each token in its sequences."""
    ends: Tensor | None
    """int64 [R, L] see `packing`; None where each row is one sequence: causal attention does."""
    positions: Tensor
    """int64 [P] row * L + column of each token that a sampled one follows."""
    targets: Tensor
    """int64 [E] the sampled tokens."""
    position_of_target: Tensor
    """int64 [E] which of the P each follows."""
    last_positions: Tensor
    """int64 [N] row * L + column of each sample's last token."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.token_ids.numel()

    def to(self, device: torch.device) -> PackedRows:
        """The rows on `device`."""
        return _moved(self, device)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows, and the samples that stand in them."""

    rows: PackedRows
    target_of_token: Tensor
    """int64 [N, S] which of the E each sampled token is."""
    mask: Tensor
    """bool [N, S] False right of a sample's last sampled token."""
    rollout_logprobs: Tensor
    """float32 [N, S]"""
    advantages: Tensor
    """float32 [N, S]"""
    rewards: Tensor
    """float32 [N, S]"""
    terminated: Tensor
    """bool [N]"""

    def of_samples(self, values: Tensor) -> Tensor:
        """[N, S] those of `values` [E] that belong to what each sample sampled."""
        return values.index_select(0, self.target_of_token.flatten()).view(self.mask.shape)

    def to(self, device: torch.device) -> MicroBatch:
        """The micro-batch on `device`."""
        return _moved(self, device)


@dataclass(frozen=True, slots=True)
class MicroBatchConfig:
    """How a batch is cut."""

    max_tokens: int
    """Tokens of a micro-batch, padding included."""
    costs: RowCosts | None
    """Of rows that hold several sequences; None gives each sequence a row of its own."""
    rank: int = 0
    num_ranks: int = 1


def split_samples(batch: Batch, num_minibatches: int) -> list[Ints]:
    """The samples of each minibatch, as rows of the batch; neighbours stay together.

    Samples of one group stand beside each other and share prefixes.
    """
    return np.array_split(np.arange(batch.num_samples), num_minibatches)


def make_micro_batches(batch: Batch, samples: Ints, config: MicroBatchConfig) -> list[MicroBatch]:
    """The micro-batches of `samples` that a rank computes; every rank gets equally many."""
    num_ranks, max_tokens = config.num_ranks, config.max_tokens
    layout = lay_out(
        batch.sequences,
        np.unique(batch.sequence_of_sample[samples]),
        costs=config.costs,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
    )
    lengths = np.diff(layout.row_starts)
    by_length = np.argsort(lengths, kind="stable")
    # Every num_ranks-th row in order of length: equal work for all.
    shares = [by_length[rank::num_ranks] for rank in range(num_ranks)]
    plans = [[rows[part] for part in cut_rows(lengths[rows], max_tokens)] for rows in shares]
    tokens = _sampled_tokens(batch, samples)
    own = [_make_micro_batch(batch, tokens, layout, rows) for rows in plans[config.rank]]
    missing = max(len(plan) for plan in plans) - len(own)
    return own + [_empty_micro_batch()] * missing


def one_micro_batch(samples: Sequence[TrainingSample]) -> MicroBatch:
    """All of `samples` in their order, each sequence in a row of its own."""
    batch = collate(samples)
    everything = np.arange(batch.num_samples)
    sequence_ids = np.arange(len(batch.sequences))
    layout = lay_out(batch.sequences, sequence_ids, costs=None, max_tokens=sys.maxsize, num_ranks=1)
    rows = np.arange(len(layout.row_starts) - 1)
    return _make_micro_batch(batch, _sampled_tokens(batch, everything), layout, rows)


def unscored_sample(token_ids: list[int], loss_mask: list[bool]) -> TrainingSample:
    """A sample of which only the log-probs are asked."""
    nothing = [0.0] * len(token_ids)
    return TrainingSample(token_ids, loss_mask, nothing, nothing, nothing, terminated=True)


@dataclass(frozen=True, slots=True)
class _SampledTokens:
    """What the loss needs of some samples, one sampled token after the other."""

    sample_ids: Ints
    """[N] rows of the batch."""
    starts: Ints
    """[N] where each sample begins below."""
    rollout_logprobs: Floats
    advantages: Floats
    rewards: Floats


def _sampled_tokens(batch: Batch, samples: Ints) -> _SampledTokens:
    rows = batch.sequence_of_sample[samples]
    counts = batch.num_sampled[rows]
    sampled = batch.loss_masks.take(rows)

    def of_sampled(values: Ragged) -> Floats:
        # And a zero, for what is read right of a sample's end.
        return np.append(values.take(samples)[sampled], np.float32(0))

    return _SampledTokens(
        samples,
        np.cumsum(counts) - counts,
        of_sampled(batch.rollout_logprobs),
        of_sampled(batch.advantages),
        of_sampled(batch.rewards),
    )


def _make_micro_batch(
    batch: Batch, tokens: _SampledTokens, layout: Layout, rows: Ints
) -> MicroBatch:
    leaves = np.flatnonzero(np.isin(layout.row_of_sequence, rows))
    sequence_ids = layout.sequence_ids[leaves]
    leaf_of_sequence = np.full(len(batch.sequences), -1)
    leaf_of_sequence[sequence_ids] = np.arange(len(leaves))
    leaf_of_sample = leaf_of_sequence[batch.sequence_of_sample[tokens.sample_ids]]
    mine = np.flatnonzero(leaf_of_sample >= 0)
    leaf_of_sample = leaf_of_sample[mine]

    lengths = batch.loss_masks.lengths[sequence_ids]
    columns = np.arange(lengths.max())
    sampled = np.zeros((len(leaves), len(columns)), dtype=np.bool_)
    sampled[columns < lengths[:, None]] = batch.loss_masks.take(sequence_ids)
    nodes = layout.nodes[leaves, : len(columns)]
    last_nodes = nodes[np.arange(len(leaves)), lengths - 1][leaf_of_sample]
    packed, target_of_token = _pack(layout, rows, nodes, sampled, last_nodes)

    counts = sampled.sum(axis=1)
    columns = np.arange(max(1, counts.max()))
    targets = np.zeros((len(leaves), len(columns)), dtype=np.int64)
    targets[columns < counts[:, None]] = target_of_token
    mask = columns < counts[leaf_of_sample][:, None]
    at = np.where(mask, tokens.starts[mine][:, None] + columns, len(tokens.rewards) - 1)
    return MicroBatch(
        rows=packed,
        target_of_token=torch.from_numpy(targets[leaf_of_sample]),
        mask=torch.from_numpy(mask),
        rollout_logprobs=torch.from_numpy(tokens.rollout_logprobs[at]),
        advantages=torch.from_numpy(tokens.advantages[at]),
        rewards=torch.from_numpy(tokens.rewards[at]),
        terminated=torch.from_numpy(batch.terminated[tokens.sample_ids[mine]]),
    )


def _pack(
    layout: Layout, rows: Ints, nodes: Ints, sampled: Bools, last_nodes: Ints
) -> tuple[PackedRows, Ints]:
    """The rows as tensors, and which target each token of `sampled` [leaves, T] is."""
    starts, lengths = layout.row_starts[rows], np.diff(layout.row_starts)[rows]
    columns = np.arange(lengths.max())
    within = columns < lengths[:, None]
    node_at = np.where(within, starts[:, None] + columns, 0)
    position_of_node = np.zeros(len(layout.token_ids), dtype=np.int64)
    position_of_node[node_at[within]] = np.flatnonzero(within)

    target_nodes, first, target_of_token = np.unique(
        nodes[sampled], return_index=True, return_inverse=True
    )
    before = nodes[:, :-1][sampled[:, 1:]][first]
    positions, position_of_target = np.unique(position_of_node[before], return_inverse=True)
    one_each = np.bincount(layout.row_of_sequence, minlength=rows.max() + 1)[rows].max() == 1
    # What pads a row looks at padding only, never at nothing: that would be nan.
    ends = np.where(within, layout.ends[node_at] - starts[:, None], len(columns))
    packed = PackedRows(
        token_ids=torch.from_numpy(np.where(within, layout.token_ids[node_at], 0)),
        depths=torch.from_numpy(np.where(within, layout.depths[node_at], 0)),
        ends=None if one_each else torch.from_numpy(ends),
        positions=torch.from_numpy(positions),
        targets=torch.from_numpy(layout.token_ids[target_nodes]),
        position_of_target=torch.from_numpy(position_of_target),
        last_positions=torch.from_numpy(position_of_node[last_nodes]),
    )
    return packed, target_of_token


def _empty_micro_batch() -> MicroBatch:
    """One token, no sample: a rank with less work joins the others' collectives with it."""
    none, nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1)
    one = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        rows=PackedRows(one[None], one[None], None, one, one, one, none),
        target_of_token=none[:, None],
        mask=nothing.bool(),
        rollout_logprobs=nothing,
        advantages=nothing,
        rewards=nothing,
        terminated=none.bool(),
    )


def _moved(value: _T, device: torch.device) -> _T:
    """A copy of a dataclass of tensors, on `device`."""
    moved = {
        field.name: None if part is None else part.to(device)
        for field in fields(value)
        for part in [getattr(value, field.name)]
    }
    return type(value)(**moved)

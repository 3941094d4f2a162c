"""Layout of token sequences in rows that compute a common prefix only once.

    a b c d          a b c d          row     a b c d e x y
    a b e     -->        e      -->   depth   0 1 2 3 2 0 1
    x y              x y              end     5 5 4 4 5 7 7

Sequences sorted by their tokens are the leaves of prefix trees in depth-first order. A row
contains the nodes of such trees. If a tree is split, both rows contain the path from its root. In
this order, the descendants of node k are the nodes up to `end[k]`, so the node at q may attend to
the node at k exactly if k <= q < end[k]. So one vector per row describes the whole attention mask.
A causal model then computes for every node the same output as in a separate row.

The length of rows is a trade-off. A longer row shares more prefixes, but the cost of attention is
quadratic in its length. `RowCosts` weighs both.

Shapes: U = sequences, T = tokens of the longest sequence, R = rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ludus.trainer.core.ragged import RaggedArray

Ints = NDArray[np.int64]

_LENGTH_GROWTH = 1.5
"""Factor between two row lengths that are tried."""
_MAX_LENGTH_RATIO = 4
"""Maximum ratio of the longest row of a micro-batch to its shortest."""


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Cost of computing a row, in any unit."""

    per_token: float
    """Cost per token, in layers that process each token separately."""
    per_pair: float
    """Cost per pair of tokens in a row, in attention layers."""

    def compute_row(self, length: int) -> float:
        """Return the cost of one row of this length."""
        return length * (self.per_token + self.per_pair * length)

    def compute_total(self, row_lengths: Ints, max_tokens: int) -> float:
        """Return the cost of rows of these lengths, in padded micro-batches."""
        row_lengths = np.sort(row_lengths)
        cost = 0.0
        for row_slice in cut_rows(row_lengths, max_tokens):
            row_size = int(row_lengths[row_slice.stop - 1])
            cost += (row_slice.stop - row_slice.start) * self.compute_row(row_size)
        return cost


@dataclass(frozen=True, slots=True)
class Layout:
    """The assignment of sequences and their tokens to the nodes of all rows."""

    sequence_ids: Ints
    """[U] indices of the sequences, in the order of their leaves."""
    row_of_sequence: Ints
    """[U] ascending row indices."""
    nodes: Ints
    """[U, T] node of each token; undefined after the end of a sequence."""
    row_starts: Ints
    """[R + 1] first node of each row, then the number of nodes."""
    token_ids: Ints
    """[nodes] token of each node."""
    depths: Ints
    """[nodes] position of the node's token in its sequences."""
    ends: Ints
    """[nodes] one past the last descendant of the node."""


def cut_rows(row_lengths: Ints, max_tokens: int) -> list[slice]:
    """Split rows, sorted by length, into slices of at most `max_tokens` tokens with padding.

    The row lengths of one micro-batch differ at most by a factor of four; a larger difference
    would mostly be padding.
    """
    lengths = row_lengths.tolist()
    starts: list[int] = []
    for row, length in enumerate(lengths):
        if (
            not starts
            or (row + 1 - starts[-1]) * length > max_tokens
            or length > _MAX_LENGTH_RATIO * lengths[starts[-1]]
        ):
            starts.append(row)
    return [slice(*bounds) for bounds in pairwise([*starts, len(lengths)])]


def lay_out_sequences(
    sequences: RaggedArray,
    sequence_ids: Ints,
    *,
    costs: RowCosts | None,
    max_tokens: int,
    num_ranks: int,
) -> Layout:
    """Return the rows of `sequences[sequence_ids]`, which `num_ranks` ranks share.

    Without `costs`, each sequence gets a separate row. A row with several sequences is not longer
    than `max_tokens`, the number of tokens that the model computes at once, and not longer than a
    rank's share of all nodes.
    """
    sorted_ids = np.array(sorted(sequence_ids, key=lambda index: sequences[index].tobytes()))
    lengths = sequences.lengths[sorted_ids]
    columns = np.arange(lengths.max())
    token_ids = np.full((len(sorted_ids), len(columns)), -1, dtype=np.int64)
    token_ids[columns < lengths[:, None]] = sequences.concatenate_rows(sorted_ids)
    num_shared, rows = np.zeros_like(lengths), np.arange(len(sorted_ids))
    if costs is not None:
        num_shared = _count_shared_tokens(token_ids, lengths)
        rows = _plan_rows(lengths, num_shared, costs, max_tokens, num_ranks)
        num_shared[np.diff(rows, prepend=-1) > 0] = 0
    return _build_layout(sorted_ids, lengths, num_shared, rows, token_ids)


def _count_shared_tokens(token_ids: Ints, lengths: Ints) -> Ints:
    """Return the length [U] of the prefix that each sequence shares with the previous sequence."""
    num_shared = np.zeros_like(lengths)
    # Padding is -1 everywhere, so the ends of two sequences also compare equal.
    num_shared[1:] = np.logical_and.accumulate(token_ids[1:] == token_ids[:-1], axis=1).sum(axis=1)
    return np.minimum(num_shared, lengths)


def _plan_rows(
    lengths: Ints, num_shared: Ints, costs: RowCosts, max_tokens: int, num_ranks: int
) -> Ints:
    """Return the row [U] of each sequence, for the maximum row length with the lowest cost."""
    max_length, num_nodes = int(lengths.max()), int((lengths - num_shared).sum())
    max_row_length = max(max_length, min(max_tokens, num_nodes // num_ranks))
    best_rows, min_cost = np.arange(len(lengths)), costs.compute_total(lengths, max_tokens)
    while True:
        rows, row_lengths = _fill_rows(lengths, num_shared, max_length)
        cost = costs.compute_total(row_lengths, max_tokens)
        if cost < min_cost:
            best_rows, min_cost = rows, cost
        if max_length >= max_row_length:
            return best_rows
        max_length = min(max_row_length, int(max_length * _LENGTH_GROWTH))


def _fill_rows(lengths: Ints, num_shared: Ints, max_length: int) -> tuple[Ints, Ints]:
    """Return the row [U] of each sequence, and the row lengths [R], at most `max_length`."""
    rows: list[int] = []
    row_lengths: list[int] = []
    for length, prefix_length in zip(lengths.tolist(), num_shared.tolist(), strict=True):
        if row_lengths and row_lengths[-1] + length - prefix_length <= max_length:
            row_lengths[-1] += length - prefix_length
        else:
            row_lengths.append(length)
        rows.append(len(row_lengths) - 1)
    return np.array(rows), np.array(row_lengths)


def _build_layout(
    sorted_ids: Ints, lengths: Ints, num_shared: Ints, rows: Ints, token_ids: Ints
) -> Layout:
    columns = np.arange(token_ids.shape[1])
    is_new = (columns >= num_shared[:, None]) & (columns < lengths[:, None])
    num_nodes = int(is_new.sum())
    starts = np.cumsum(lengths - num_shared) - (lengths - num_shared)
    # The node of a shared token is the latest earlier node in the same column.
    nodes = np.where(is_new, starts[:, None] + columns - num_shared[:, None], -1)
    nodes = np.maximum.accumulate(nodes, axis=0)
    # A node's descendants end at the first later sequence that does not share its prefix.
    branch_starts = np.where(num_shared[:, None] <= columns, starts[:, None], num_nodes)
    ends = np.full_like(branch_starts, num_nodes)
    ends[:-1] = np.minimum.accumulate(branch_starts[::-1], axis=0)[::-1][1:]
    first_sequences = np.flatnonzero(np.diff(rows, prepend=-1))
    return Layout(
        sequence_ids=sorted_ids,
        row_of_sequence=rows,
        nodes=nodes,
        row_starts=np.append(starts[first_sequences], num_nodes),
        token_ids=token_ids[is_new],
        depths=np.broadcast_to(columns, is_new.shape)[is_new],
        ends=ends[is_new],
    )

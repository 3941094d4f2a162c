"""Layout of token sequences in rows that compute a common prefix only once.

    a b c d          a b c d          row     a b c d e x y
    a b e     -->        e      -->   depth   0 1 2 3 2 0 1
    x y              x y              end     5 5 4 4 5 7 7

Sequences sorted by their tokens are the leaves of prefix trees in depth-first order. A row
contains the nodes of such trees. A tree that is split has its path from the root in both rows. In
this order, the descendants of node k are the nodes up to `end[k]`, so the node at q may attend to
the node at k exactly if k <= q < end[k]: one vector per row describes the whole attention mask. A
causal model then computes for every node the same output as in a separate row.

The length of rows is a trade-off. A longer row shares more prefixes, but the cost of attention is
quadratic in its length. `RowCosts` weighs both.

Shapes: U = sequences, T = tokens of the longest sequence, R = rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ludus.trainer.core.ragged import Ragged

Ints = NDArray[np.int64]

_GROWTH = 1.5
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

    def total(self, row_lengths: Ints, max_tokens: int) -> float:
        """Return the cost of rows of these lengths, in padded micro-batches."""
        row_lengths = np.sort(row_lengths)
        cost = 0.0
        for part in cut_rows(row_lengths, max_tokens):
            row_size = int(row_lengths[part.stop - 1])
            num_tokens = (part.stop - part.start) * row_size
            cost += num_tokens * (self.per_token + self.per_pair * row_size)
        return cost


@dataclass(frozen=True, slots=True)
class Layout:
    """The assignment of sequences and their tokens to the nodes of all rows."""

    sequence_ids: Ints
    """[U] sequences in the order of their leaves."""
    row_of_sequence: Ints
    """[U] ascending row indices."""
    nodes: Ints
    """[U, T] node of each token; undefined after the end of a sequence."""
    row_starts: Ints
    """[R + 1] first node of each row, then the number of nodes."""
    token_ids: Ints
    """[nodes]"""
    depths: Ints
    """[nodes] position of the node's token in its sequences."""
    ends: Ints
    """[nodes] one past the last descendant of the node."""


def cut_rows(row_lengths: Ints, max_tokens: int) -> list[slice]:
    """Split rows, sorted by length, so that rows times longest is at most `max_tokens`.

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


def lay_out(
    sequences: Ragged,
    sequence_ids: Ints,
    *,
    costs: RowCosts | None,
    max_tokens: int,
    num_ranks: int,
) -> Layout:
    """Return the rows of `sequences[sequence_ids]`, which `num_ranks` ranks share.

    Without `costs`, each sequence gets a separate row. No row is longer than `max_tokens`, the
    tokens that the model computes at once, or than a rank's share of all nodes, unless a single
    sequence is.
    """
    order = np.array(sorted(sequence_ids, key=lambda i: sequences[i].tobytes()), dtype=np.int64)
    lengths = sequences.lengths[order]
    columns = np.arange(lengths.max())
    matrix = np.full((len(order), len(columns)), -1, dtype=np.int64)
    matrix[columns < lengths[:, None]] = sequences.take(order)
    if costs is None:
        return _build_layout(order, lengths, np.zeros_like(lengths), np.arange(len(order)), matrix)
    overlaps = _shared_with_previous(matrix, lengths)
    rows = _plan_rows(lengths, overlaps, costs, max_tokens, num_ranks)
    overlaps[np.diff(rows, prepend=-1) > 0] = 0
    return _build_layout(order, lengths, overlaps, rows, matrix)


def _shared_with_previous(padded: Ints, lengths: Ints) -> Ints:
    """Return [U] the length of the prefix that each sequence shares with the previous one."""
    overlaps = np.zeros_like(lengths)
    # Padding is -1 everywhere, so the ends of two sequences also compare equal.
    overlaps[1:] = np.logical_and.accumulate(padded[1:] == padded[:-1], axis=1).sum(axis=1)
    return np.minimum(overlaps, lengths)


def _plan_rows(
    lengths: Ints, shared: Ints, costs: RowCosts, max_tokens: int, num_ranks: int
) -> Ints:
    """Return [U] the row of each sequence, for the cheapest limit of the row length."""
    limit, num_nodes = int(lengths.max()), int((lengths - shared).sum())
    max_limit = max(limit, min(max_tokens, num_nodes // num_ranks))
    best_rows, min_cost = np.arange(len(lengths)), costs.total(lengths, max_tokens)
    while True:
        rows, row_lengths = _fill_rows(lengths, shared, limit)
        cost = costs.total(row_lengths, max_tokens)
        if cost < min_cost:
            best_rows, min_cost = rows, cost
        if limit >= max_limit:
            return best_rows
        limit = min(max_limit, int(limit * _GROWTH))


def _fill_rows(lengths: Ints, shared: Ints, limit: int) -> tuple[Ints, Ints]:
    """Return [U] the row of each sequence, and [R] the row lengths, which do not exceed `limit`."""
    rows: list[int] = []
    row_lengths: list[int] = []
    for length, prefix in zip(lengths.tolist(), shared.tolist(), strict=True):
        if row_lengths and row_lengths[-1] + length - prefix <= limit:
            row_lengths[-1] += length - prefix
        else:
            row_lengths.append(length)
        rows.append(len(row_lengths) - 1)
    return np.array(rows), np.array(row_lengths)


def _build_layout(order: Ints, lengths: Ints, shared: Ints, rows: Ints, padded: Ints) -> Layout:
    columns = np.arange(padded.shape[1])
    is_new = (columns >= shared[:, None]) & (columns < lengths[:, None])
    num_nodes = int(is_new.sum())
    starts = np.cumsum(lengths - shared) - (lengths - shared)
    # The node of a shared token is the latest node in its column: numbers grow from row to row.
    nodes = np.where(is_new, starts[:, None] + columns - shared[:, None], -1)
    nodes = np.maximum.accumulate(nodes, axis=0)
    # A node's descendants end at the first later sequence that does not share its prefix.
    branch_starts = np.where(shared[:, None] <= columns, starts[:, None], num_nodes)
    ends = np.full_like(branch_starts, num_nodes)
    ends[:-1] = np.minimum.accumulate(branch_starts[::-1], axis=0)[::-1][1:]
    first_of_row = np.flatnonzero(np.diff(rows, prepend=-1))
    return Layout(
        sequence_ids=order,
        row_of_sequence=rows,
        nodes=nodes,
        row_starts=np.append(starts[first_of_row], num_nodes),
        token_ids=padded[is_new],
        depths=np.broadcast_to(columns, is_new.shape)[is_new],
        ends=ends[is_new],
    )

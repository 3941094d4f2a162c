"""Lays token sequences out in rows in which a common prefix is computed once.

    a b c d          a b c d          row     a b c d e x y
    a b e     -->        e      -->   depth   0 1 2 3 2 0 1
    x y              x y              end     5 5 4 4 5 7 7

Sequences sorted by their tokens are the leaves of prefix trees in depth-first order. A row
holds the nodes of such trees; a tree that is cut has its path from the root in both rows. In
this order the descendants of node k are the nodes up to `end[k]`, so the node at q may look at
the node at k exactly when k <= q < end[k]: one vector per row says the whole attention mask. A
causal model then gives every node what it would give it in a row of its own.

How long rows should be is a trade: a long row shares more, but attention takes the square of
its length. `RowCosts` weighs both by what the model computes.

Shapes: U = sequences, T = their longest, R = rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ludus.trainer.core.ragged import Ragged

Ints = NDArray[np.int64]

_GROWTH = 1.5
"""Between one row length that is tried and the next."""
_MOST_UNEQUAL = 4
"""Longest row of a micro-batch to its shortest."""


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What a model computes for a row, in any unit."""

    per_token: float
    """In layers that look at one token."""
    per_pair: float
    """In attention, for each pair of tokens of a row."""

    def of_rows(self, row_lengths: Ints, max_tokens: int) -> float:
        """The cost of rows of these lengths, in micro-batches and padded as they will be."""
        row_lengths = np.sort(row_lengths)
        cost = 0.0
        for part in cut_rows(row_lengths, max_tokens):
            longest = int(row_lengths[part.stop - 1])
            num_tokens = (part.stop - part.start) * longest
            cost += num_tokens * (self.per_token + self.per_pair * longest)
        return cost


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each token of some sequences stands among the nodes of all rows."""

    sequence_ids: Ints
    """[U] the sequences in the order of their leaves."""
    row_of_sequence: Ints
    """[U] ascending."""
    nodes: Ints
    """[U, T] the node of each token; what stands right of a sequence's end means nothing."""
    row_starts: Ints
    """[R + 1] the first node of each row, and the number of nodes."""
    token_ids: Ints
    """[nodes]"""
    depths: Ints
    """[nodes] tokens before it in its sequences: its position."""
    ends: Ints
    """[nodes] one past its last descendant."""


def cut_rows(row_lengths: Ints, max_tokens: int) -> list[slice]:
    """Rows, shortest first, cut so that rows times longest stays within `max_tokens`.

    Rows of one micro-batch differ in length by a factor of four at most: the rest would be padding.
    """
    lengths = row_lengths.tolist()
    starts: list[int] = []
    for row, length in enumerate(lengths):
        if (
            not starts
            or (row + 1 - starts[-1]) * length > max_tokens
            or length > _MOST_UNEQUAL * lengths[starts[-1]]
        ):
            starts.append(row)
    return [slice(*ends) for ends in pairwise([*starts, len(lengths)])]


def lay_out(
    sequences: Ragged,
    sequence_ids: Ints,
    *,
    costs: RowCosts | None,
    max_tokens: int,
    num_ranks: int,
) -> Layout:
    """The rows of `sequences[sequence_ids]`; each sequence has its own when `costs` is None.

    The model computes up to `max_tokens` at once. No row is longer than that, or than a rank's
    share of all nodes, unless one sequence alone is.
    """
    order = np.array(sorted(sequence_ids, key=lambda i: sequences[i].tobytes()), dtype=np.int64)
    lengths = sequences.lengths[order]
    columns = np.arange(lengths.max())
    padded = np.full((len(order), len(columns)), -1, dtype=np.int64)
    padded[columns < lengths[:, None]] = sequences.take(order)
    if costs is None:
        return _build(order, lengths, np.zeros_like(lengths), np.arange(len(order)), padded)
    shared = _shared_with_previous(padded, lengths)
    rows = _plan_rows(lengths, shared, costs, max_tokens, num_ranks)
    shared[np.diff(rows, prepend=-1) > 0] = 0
    return _build(order, lengths, shared, rows, padded)


def _shared_with_previous(padded: Ints, lengths: Ints) -> Ints:
    """[U] how many first tokens each sequence has in common with the one before it."""
    shared = np.zeros_like(lengths)
    # -1 stands right of a sequence, so two ends side by side are equal, too.
    shared[1:] = np.logical_and.accumulate(padded[1:] == padded[:-1], axis=1).sum(axis=1)
    return np.minimum(shared, lengths)


def _plan_rows(
    lengths: Ints, shared: Ints, costs: RowCosts, max_tokens: int, num_ranks: int
) -> Ints:
    """[U] the row of each sequence, for that row length which costs least."""
    limit, num_nodes = int(lengths.max()), int((lengths - shared).sum())
    largest = max(limit, min(max_tokens, num_nodes // num_ranks))
    best, lowest = np.arange(len(lengths)), costs.of_rows(lengths, max_tokens)
    while True:
        rows, row_lengths = _fill_rows(lengths, shared, limit)
        cost = costs.of_rows(row_lengths, max_tokens)
        if cost < lowest:
            best, lowest = rows, cost
        if limit >= largest:
            return best
        limit = min(largest, int(limit * _GROWTH))


def _fill_rows(lengths: Ints, shared: Ints, limit: int) -> tuple[Ints, Ints]:
    """[U] the row of each sequence when none may exceed `limit`, and [R] the rows' lengths."""
    rows: list[int] = []
    row_lengths: list[int] = []
    for length, prefix in zip(lengths.tolist(), shared.tolist(), strict=True):
        if row_lengths and row_lengths[-1] + length - prefix <= limit:
            row_lengths[-1] += length - prefix
        else:
            row_lengths.append(length)
        rows.append(len(row_lengths) - 1)
    return np.array(rows), np.array(row_lengths)


def _build(order: Ints, lengths: Ints, shared: Ints, rows: Ints, padded: Ints) -> Layout:
    columns = np.arange(padded.shape[1])
    own = (columns >= shared[:, None]) & (columns < lengths[:, None])
    num_nodes = int(own.sum())
    starts = np.cumsum(lengths - shared) - (lengths - shared)
    # A shared token's node is the newest one in its column: nodes are numbered downwards.
    nodes = np.where(own, starts[:, None] + columns - shared[:, None], -1)
    nodes = np.maximum.accumulate(nodes, axis=0)
    # A node's descendants end where the first later sequence leaves its prefix.
    leaves = np.where(shared[:, None] <= columns, starts[:, None], num_nodes)
    later = np.full_like(leaves, num_nodes)
    later[:-1] = np.minimum.accumulate(leaves[::-1], axis=0)[::-1][1:]
    first_of_row = np.flatnonzero(np.diff(rows, prepend=-1))
    return Layout(
        sequence_ids=order,
        row_of_sequence=rows,
        nodes=nodes,
        row_starts=np.append(starts[first_of_row], num_nodes),
        token_ids=padded[own],
        depths=np.broadcast_to(columns, own.shape)[own],
        ends=later[own],
    )

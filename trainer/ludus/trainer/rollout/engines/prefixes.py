"""Keys and values of completed requests, for later requests that start with the same tokens.

The next turn of a conversation starts with the tokens of the previous turn, and prompts of one
environment start with the same instructions. Sequences are found by the hashes of their beginnings,
in blocks of tokens; each hash includes the hash of the previous block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

BLOCK_TOKENS = 16
"""Number of tokens of a block."""


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The keys and values of a sequence's first tokens."""

    values: Tensor
    """[2, layers, heads, columns, head size]"""
    start: int
    """Column of the first token."""
    token_ids: Sequence[int]
    """Tokens of the sequence; only the first `num_tokens` belong to the prefix."""
    num_tokens: int

    def matches(self, sequence: Sequence[int]) -> bool:
        """Return whether the sequence starts with these tokens."""
        return list(sequence[: self.num_tokens]) == list(self.token_ids[: self.num_tokens])

    def read(self, num_tokens: int) -> Tensor:
        """Return the keys and values of the first `num_tokens` tokens."""
        return self.values[..., self.start : self.start + num_tokens, :]


@dataclass(eq=False, slots=True)
class _Batch:
    """Sequences that were stored together; they are dropped together."""

    num_bytes: int
    keys: list[int] = field(default_factory=list)


class PrefixStore:
    """A store of the newest sequences, with a limit on its memory."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        """Size of the keys and values that can be stored."""
        self._num_bytes = 0
        self._batches: OrderedDict[int, _Batch] = OrderedDict()
        """Batches from the oldest to the newest."""
        self._prefixes: dict[int, tuple[int, StoredPrefix]] = {}
        """Number of the batch and the longest known beginning, by the hash of its blocks."""
        self._next_batch = 0

    @property
    def is_enabled(self) -> bool:
        """True if anything can be stored."""
        return self.max_bytes > 0

    def add(
        self, sequences: Sequence[Sequence[int]], values: Tensor, starts: Sequence[int]
    ) -> None:
        """Store the rows of `values`, [2, layers, rows, heads, columns, head size].

        The tokens of a row begin in its start column, and continue in later columns.
        """
        batch = _Batch(values.nbytes)
        if batch.num_bytes > self.max_bytes:
            return
        number, self._next_batch = self._next_batch, self._next_batch + 1
        for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            for num_tokens, key in _hash_blocks(sequence):
                prefix = StoredPrefix(values[:, :, row], start, sequence, num_tokens)
                self._prefixes[key] = (number, prefix)
                batch.keys.append(key)
        self._batches[number] = batch
        self._num_bytes += batch.num_bytes
        while self._num_bytes > self.max_bytes:
            self._drop_oldest()

    def find(self, sequence: Sequence[int]) -> StoredPrefix | None:
        """Return the longest stored beginning of the sequence, without its last token."""
        prefix: StoredPrefix | None = None
        for _, key in _hash_blocks(sequence[:-1]):
            if key not in self._prefixes:
                break
            prefix = self._prefixes[key][1]
        # Hashes of different blocks may be equal by chance.
        return prefix if prefix is not None and prefix.matches(sequence) else None

    def clear(self) -> None:
        """Drop everything, because the weights have changed."""
        self._batches.clear()
        self._prefixes.clear()
        self._num_bytes = 0

    def _drop_oldest(self) -> None:
        number, batch = self._batches.popitem(last=False)
        self._num_bytes -= batch.num_bytes
        for key in batch.keys:
            # A newer batch may have replaced the beginning.
            if self._prefixes.get(key, (None,))[0] == number:
                del self._prefixes[key]


def find_shared_beginnings(sequences: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Return beginnings of whole blocks that several sequences share.

    Neighbours in lexicographic order form a group while it shares at least half of what its first
    sequences share, so that a long beginning of a few is not given up for a short one of many.
    """
    beginnings: list[Sequence[int]] = []
    ordered = sorted(sequences, key=tuple)
    first, num_shared = 0, 0
    for index in range(1, len(ordered) + 1):
        num_common = _count_common(ordered[index - 1], ordered[index]) if ordered[index:] else 0
        num_common = min(num_common, num_shared or num_common)
        if num_common and 2 * num_common >= num_shared:
            num_shared = num_common
            continue
        if num_shared:
            beginnings.append(ordered[first][:num_shared])
        first, num_shared = index, 0
    return beginnings


def _count_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens in the blocks with which both sequences begin."""
    num_tokens = 0
    for first_id, second_id in zip(first, second, strict=False):
        if first_id != second_id:
            break
        num_tokens += 1
    return num_tokens - num_tokens % BLOCK_TOKENS


def _hash_blocks(sequence: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the number of tokens and the hash of each beginning that consists of whole blocks."""
    key = 0
    for end in range(BLOCK_TOKENS, len(sequence) + 1, BLOCK_TOKENS):
        key = hash((key, tuple(sequence[end - BLOCK_TOKENS : end])))
        yield end, key

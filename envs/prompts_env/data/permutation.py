"""A permutation of 0 ... n - 1 that is computed element by element.

A Feistel network over the smallest even number of bits that can represent n - 1, applied repeatedly
until the result is below n ("cycle walking"): Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002. It stores no list for any n, and gives the same result on every machine and in every
version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

_NUM_ROUNDS = 8
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Permutation:
    """A pseudorandom permutation of 0 ... `size` - 1, determined by `key`."""

    size: int
    key: str
    _half_bits: int = field(init=False)
    _round_keys: tuple[bytes, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_half_bits", max(1, ((self.size - 1).bit_length() + 1) // 2))
        digests = (blake2b(f"{index} {self.key}".encode()) for index in range(_NUM_ROUNDS))
        object.__setattr__(self, "_round_keys", tuple(digest.digest() for digest in digests))

    def __getitem__(self, index: int) -> int:
        """Return element `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"expected an index from 0 to {self.size - 1}, got {index}")
        element = self._apply_rounds(index)
        while element >= self.size:
            element = self._apply_rounds(element)
        return element

    def _apply_rounds(self, number: int) -> int:
        bits = self._half_bits
        mask = (1 << bits) - 1
        upper, lower = number >> bits, number & mask
        for key in self._round_keys:
            digest = blake2b(lower.to_bytes(8, "little"), key=key, digest_size=_DIGEST_BYTES)
            upper, lower = lower, upper ^ (int.from_bytes(digest.digest(), "little") & mask)
        return upper << bits | lower

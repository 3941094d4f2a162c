"""A permutation of 0 ... n - 1 that is computed place by place.

A Feistel network over the smallest even number of bits that holds n, walked until it lands below
n again ("cycle walking"): Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002. It
keeps no list, whatever n is, and is the same on every machine and in every version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

_NUM_ROUNDS = 8
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Permutation:
    """One of the orders of `size` things; which one, the text `key` says."""

    size: int
    key: str
    _half_bits: int = field(init=False)
    _round_keys: tuple[bytes, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_half_bits", max(1, ((self.size - 1).bit_length() + 1) // 2))
        keys = (blake2b(f"{number} {self.key}".encode()) for number in range(_NUM_ROUNDS))
        object.__setattr__(self, "_round_keys", tuple(key.digest() for key in keys))

    def __getitem__(self, place: int) -> int:
        """What stands at `place`, from 0; every place holds another."""
        if not 0 <= place < self.size:
            raise IndexError(f"expected a place from 0 to {self.size - 1}, got {place}")
        place = self._exchanged(place)
        while place >= self.size:
            place = self._exchanged(place)
        return place

    def _exchanged(self, number: int) -> int:
        bits = self._half_bits
        mask = (1 << bits) - 1
        left, right = number >> bits, number & mask
        for key in self._round_keys:
            digest = blake2b(right.to_bytes(8, "little"), key=key, digest_size=_DIGEST_BYTES)
            left, right = right, left ^ (int.from_bytes(digest.digest(), "little") & mask)
        return left << bits | right

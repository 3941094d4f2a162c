"""A cache whose limit is the total size of its entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from sys import getsizeof
from threading import Lock
from typing import Generic, TypeVar

_BYTES_PER_TOKEN = 40
"""Size of an int and its entry in a tuple."""
_BYTES_PER_ENTRY = 512

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class SizedCache(Generic[KeyT, ValueT]):
    """A function with a cache of its results, bounded by the total size of all entries.

    The number of entries is no useful bound, because sizes differ 1,000-fold. The least recently
    used result is evicted first. Several threads may call the function.
    """

    def __init__(
        self,
        function: Callable[[KeyT], ValueT],
        measure_entry: Callable[[KeyT, ValueT], int],
        max_size: int,
    ) -> None:
        """`measure_entry` returns the size of an entry; `max_size` bounds the sum of all sizes."""
        self._function = function
        self._measure_entry = measure_entry
        self._max_size = max_size
        self.size = 0
        """Sum of the sizes of all entries."""
        self._results: OrderedDict[KeyT, ValueT] = OrderedDict()
        self._lock = Lock()

    def __call__(self, key: KeyT) -> ValueT:
        """Return the function's result, from the cache if possible."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key]
        result = self._function(key)
        size = self._measure_entry(key, result)
        with self._lock:
            if size <= self._max_size and key not in self._results:
                self._results[key] = result
                self.size += size
                while self.size > self._max_size:
                    self.size -= self._measure_entry(*self._results.popitem(last=False))
        return result


def measure_entry(*contents: object) -> int:
    """Return the approximate size of an entry of nested tuples of texts and token ids."""
    return _BYTES_PER_ENTRY + _measure_content(contents)


def _measure_content(content: object) -> int:
    if isinstance(content, str):
        return getsizeof(content)
    return sum(map(_measure_content, content)) if isinstance(content, tuple) else _BYTES_PER_TOKEN

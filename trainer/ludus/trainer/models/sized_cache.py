"""A cache bounded by the size of its entries, not by their number: sizes differ 1,000-fold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class SizedCache(Generic[KeyT, ValueT]):
    """A function with a cache of its results; evicts the least recently used. Not thread-safe."""

    def __init__(
        self,
        function: Callable[[KeyT], ValueT],
        entry_size: Callable[[KeyT, ValueT], int],
        max_size: int,
    ) -> None:
        """`entry_size` returns the size of an entry; `max_size` bounds the sum of all sizes."""
        self._function = function
        self._entry_size = entry_size
        self._max_size = max_size
        self._size = 0
        self._values: OrderedDict[KeyT, ValueT] = OrderedDict()

    @property
    def size(self) -> int:
        """The sum of the sizes of all entries."""
        return self._size

    def __call__(self, key: KeyT) -> ValueT:
        """Return the function's result, from the cache if possible."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = self._function(key)
        size = self._entry_size(key, value)
        if size <= self._max_size:
            self._values[key] = value
            self._size += size
            while self._size > self._max_size:
                self._size -= self._entry_size(*self._values.popitem(last=False))
        return value

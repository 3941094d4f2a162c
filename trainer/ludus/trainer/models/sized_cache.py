"""A cache bounded by what it holds, not by how many: entries differ by a factor of 1,000."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class SizedCache(Generic[KeyT, ValueT]):
    """What a function has returned, by its argument; what was not asked for longest goes first.

    For one thread.
    """

    def __init__(
        self,
        function: Callable[[KeyT], ValueT],
        size_of: Callable[[KeyT, ValueT], int],
        max_size: int,
    ) -> None:
        """`size_of` says what an entry adds to the sum that `max_size` bounds."""
        self._function = function
        self._size_of = size_of
        self._max_size = max_size
        self._size = 0
        self._values: OrderedDict[KeyT, ValueT] = OrderedDict()

    @property
    def size(self) -> int:
        """Of all entries together."""
        return self._size

    def __call__(self, key: KeyT) -> ValueT:
        """What the function returns."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = self._function(key)
        size = self._size_of(key, value)
        if size <= self._max_size:
            self._values[key] = value
            self._size += size
            while self._size > self._max_size:
                self._size -= self._size_of(*self._values.popitem(last=False))
        return value

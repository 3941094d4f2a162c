"""Which rows of a file an episode plays: windows by seed, the last ones held back.

Windows of training end before those that are held back begin: a policy that has learnt prices by
heart knows nothing of the test.
"""

from __future__ import annotations

import math

from ludus.proto.errors import ConfigError

_FIRST_TEST_SEED = 2**31


class Windows:
    """The windows of one file.

    Args:
        num_rows: of the file.
        length: of a window, in rows.
        test_share: of the rows, the last, which are held back.

    Raises:
        ConfigError: one of both parts has rows, but not enough for a window.
    """

    def __init__(self, num_rows: int, length: int, test_share: float) -> None:
        self._num_train_rows = num_rows - round(num_rows * test_share)
        self.num_train = self._num_train_rows - length + 1
        num_test_rows = num_rows - self._num_train_rows
        self.num_test = num_test_rows - length + 1 if num_test_rows else 0
        if self.num_train < 1 or (num_test_rows and self.num_test < 1):
            raise ConfigError(
                f"expected at least {length} rows of prices for training and for the test, got"
                f" {self._num_train_rows} and {num_test_rows}; lower num_steps, window or"
                " test_share"
            )

    def start_of(self, seed: int) -> int:
        """The first row of the seed's window; consecutive seeds show all windows once."""
        if seed < _FIRST_TEST_SEED or not self.num_test:
            return _spread(seed, self.num_train)
        return self._num_train_rows + _spread(seed - _FIRST_TEST_SEED, self.num_test)


def _spread(number: int, size: int) -> int:
    """A place below size: neighbours lie far apart, and `size` of them in a row hit all places."""
    stride = max(1, round(size * 0.618))
    while math.gcd(stride, size) != 1:
        stride += 1
    return number * stride % size

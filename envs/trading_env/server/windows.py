"""Windows of a price file, chosen by seed. The last rows are kept for evaluation.

Training windows end before the first test row, so a policy that has memorized training prices has
no advantage in the test.
"""

from __future__ import annotations

import math

from ludus.proto.errors import ConfigError
from ludus.proto.seeds import FIRST_EVAL_SEED


class Windows:
    """The training and test windows of one file.

    Args:
        num_rows: Number of rows in the file.
        num_window_rows: Number of rows per window.
        test_share: Share of the rows, at the end of the file, that form the test part.

    Raises:
        ConfigError: The training or the test part is shorter than one window.
    """

    def __init__(self, num_rows: int, num_window_rows: int, test_share: float) -> None:
        self._num_train_rows = num_rows - round(num_rows * test_share)
        self.num_train = self._num_train_rows - num_window_rows + 1
        num_test_rows = num_rows - self._num_train_rows
        self.num_test = num_test_rows - num_window_rows + 1 if num_test_rows else 0
        if self.num_train < 1 or (num_test_rows and self.num_test < 1):
            raise ConfigError(
                f"an episode needs {num_window_rows} rows of prices, but the file has"
                f" {self._num_train_rows} for training and {num_test_rows} for the test; lower"
                " num_steps, window or test_share"
            )

    def find_start_row(self, seed: int) -> int:
        """Return the first row of the seed's window. Consecutive seeds use every window once."""
        if seed < FIRST_EVAL_SEED or not self.num_test:
            return _spread_number(seed, self.num_train)
        return self._num_train_rows + _spread_number(seed - FIRST_EVAL_SEED, self.num_test)


def _spread_number(number: int, size: int) -> int:
    """Map a number to 0 ... `size` - 1.

    Neighbors are far apart, and `size` consecutive numbers reach every value once.
    """
    stride = max(1, round(size * 0.618))
    while math.gcd(stride, size) != 1:
        stride += 1
    return number * stride % size

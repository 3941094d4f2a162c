"""Mapping from seeds to rows.

    rows --split once--> train | test
    seed below 2**31      position `seed` of train, in epoch seed // n; each epoch has another order
    seed from 2**31       position `seed - 2**31` of test, in the same way

The test rows depend only on the number of rows and on the seed of the split, so two servers with
the same file agree. If the share of the test grows, the earlier test rows stay test rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ludus.env.types import TaskSet
from ludus.proto.errors import ConfigError
from ludus.proto.seeds import FIRST_EVAL_SEED

from ..models import Split
from .permutation import Permutation
from .rows import Rows


@dataclass(frozen=True, slots=True)
class RowTask:
    """One row, with its data set and split."""

    rows: Rows
    row: int
    split: Split


class RowTasks:
    """The rows of a data set, addressed by seed.

    Args:
        rows: Training rows, and test rows if `test_rows` is None.
        test_rows: Test rows, if they are separate.
        num_test_rows: Number of `rows` to keep for the test.
        seed: Seed of the split and of the order in each epoch.
    """

    def __init__(self, rows: Rows, test_rows: Rows | None, num_test_rows: int, seed: int) -> None:
        self._rows = rows
        self._test_rows = rows if test_rows is None else test_rows
        self._num_train = len(rows) - num_test_rows
        self._num_test = num_test_rows if test_rows is None else len(test_rows)
        self._seed = seed
        self._split_order = Permutation(len(rows), f"prompts_env split {seed}")
        self._has_common_rows = test_rows is None

    @property
    def rows(self) -> Rows:
        """The training rows, and the test rows if they are not separate."""
        return self._rows

    @property
    def task_set(self) -> TaskSet:
        """The numbers of tasks and the columns."""
        return TaskSet(self._num_train, self._num_test, self._rows.columns)

    def find_task(self, seed: int) -> RowTask:
        """Return the row of a seed."""
        if seed < FIRST_EVAL_SEED or not self._num_test:
            return self._find_train_task(seed % FIRST_EVAL_SEED)
        return self._find_test_task(seed - FIRST_EVAL_SEED)

    def _find_train_task(self, position: int) -> RowTask:
        shuffled_position = self._shuffle_position(position, self._num_train, "train")
        return RowTask(self._rows, self._split_order[shuffled_position], "train")

    def _find_test_task(self, position: int) -> RowTask:
        shuffled_position = self._shuffle_position(position, self._num_test, "test")
        row_index = (
            self._split_order[self._num_train + shuffled_position]
            if self._has_common_rows
            else shuffled_position
        )
        return RowTask(self._test_rows, row_index, "test")

    def _shuffle_position(self, position: int, size: int, split: Split) -> int:
        """Return the shuffled position for a position that counts through all epochs."""
        epoch, index = divmod(position, size)
        return _make_permutation(size, f"prompts_env {split} {self._seed} {epoch}")[index]


@lru_cache(maxsize=64)
def _make_permutation(size: int, key: str) -> Permutation:
    return Permutation(size, key)


def count_test_rows(test_size: float, num_rows: int) -> int:
    """Return the number of test rows for `test_size`, a share below 1 or a number of rows.

    Raises:
        ConfigError: `test_size` is not such a number, or no row would remain for training.
    """
    if test_size >= 1 and test_size != int(test_size):
        raise ConfigError(
            f"test_size must be a share below 1 or a whole number of rows, got {test_size!r}"
        )
    num_test_rows = int(test_size)
    if 0 < test_size < 1:
        num_test_rows = max(1, round(test_size * num_rows))
    if num_test_rows >= num_rows:
        raise ConfigError(
            f"test_size = {test_size} keeps {num_test_rows} of {num_rows} rows for the test, so "
            "that none remains for training; lower test_size"
        )
    return num_test_rows

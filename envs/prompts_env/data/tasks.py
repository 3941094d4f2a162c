"""Which row a seed stands for.

    rows --split, once--> train | test
    seed below 2**31      place `seed` of train: epoch seed // n, shuffled anew in each
    seed from 2**31 on    place `seed - 2**31` of test, the same way

What is a test row follows from the number of rows and the seed of the split alone: two servers of
one file agree. With a larger share for the test, the rows that it had before stay in it.
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
class Task:
    """One row, and where it is from."""

    rows: Rows
    row: int
    split: Split


class Tasks:
    """The rows of a data set, dealt out by seeds."""

    def __init__(self, rows: Rows, test_rows: Rows | None, num_test: int, seed: int) -> None:
        """Hold `num_test` of the rows back, or all of `test_rows` where those are given."""
        self._rows = rows
        self._test_rows = rows if test_rows is None else test_rows
        self._num_train = len(rows) - num_test
        self._num_test = num_test if test_rows is None else len(test_rows)
        self._seed = seed
        self._split = Permutation(len(rows), f"prompts_env split {seed}")
        self._is_split = test_rows is None

    @property
    def rows(self) -> Rows:
        """Those of training, and of the test where it has no file of its own."""
        return self._rows

    @property
    def described(self) -> TaskSet:
        """How many there are."""
        return TaskSet(self._num_train, self._num_test, self._rows.columns)

    def of_seed(self, seed: int) -> Task:
        """The row that a seed stands for."""
        if seed < FIRST_EVAL_SEED or not self._num_test:
            return self.train(seed % FIRST_EVAL_SEED)
        return self.test(seed - FIRST_EVAL_SEED)

    def train(self, position: int) -> Task:
        """The row at a position of training, which goes on from epoch to epoch."""
        rank = self._rank(position, self._num_train, "train")
        return Task(self._rows, self._split[rank], "train")

    def test(self, position: int) -> Task:
        """The same among the rows that are held back."""
        rank = self._rank(position, self._num_test, "test")
        row = self._split[self._num_train + rank] if self._is_split else rank
        return Task(self._test_rows, row, "test")

    def _rank(self, position: int, size: int, split: Split) -> int:
        epoch, place = divmod(position, size)
        return _order(size, f"prompts_env {split} {self._seed} {epoch}")[place]


@lru_cache(maxsize=64)
def _order(size: int, key: str) -> Permutation:
    return Permutation(size, key)


def number_of_test_rows(test_size: float, num_rows: int) -> int:
    """How many rows `test_size` holds back: a share below 1, or a number.

    Raises:
        ConfigError: it leaves nothing to train on, or is no such number.
    """
    is_number = isinstance(test_size, (int, float)) and not isinstance(test_size, bool)
    if not is_number or not test_size >= 0 or (test_size >= 1 and test_size != int(test_size)):
        raise ConfigError(
            f"test_size expected a share below 1 or a whole number of rows, got {test_size!r}"
        )
    number = round(test_size * num_rows) if test_size < 1 else int(test_size)
    if 0 < test_size < 1:
        number = max(1, number)
    if number >= num_rows:
        raise ConfigError(
            f"test_size = {test_size} holds back {number} of {num_rows} rows, and leaves none to "
            "train on; lower it"
        )
    return number

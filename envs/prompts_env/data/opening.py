"""A data set as its options name it, opened once in each process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ludus.env.types import JsonObject

from .prompt_format import PromptFormat
from .rows import Rows, open_rows
from .tasks import Tasks, number_of_test_rows


@dataclass(frozen=True, slots=True)
class DataSource:
    """Where the rows are, and how they are divided."""

    path: str
    split: str | None = None
    test_path: str | None = None
    test_split: str | None = None
    test_size: float = 0
    seed: int = 0

    @property
    def has_test_of_its_own(self) -> bool:
        """Whether the rows of the test lie elsewhere than those of training."""
        return self.test_path is not None or self.test_split is not None


def open_tasks(source: DataSource, prompt: PromptFormat) -> Tasks:
    """The tasks, which all environments of this process share.

    Raises:
        ConfigError: the data is not there or does not fit.
    """
    rows = _shared(source.path, source.split, prompt)
    test_rows = None
    if source.has_test_of_its_own:
        test_rows = _shared(source.test_path or source.path, source.test_split, prompt)
    num_test = number_of_test_rows(source.test_size, len(rows))
    return Tasks(rows, test_rows, num_test, source.seed)


def _shared(path: str, split: str | None, prompt: PromptFormat) -> Rows:
    place = Path(path).expanduser().absolute()
    return _opened(place, split, prompt, _version_of(place))


@lru_cache(maxsize=8)
def _opened(path: Path, split: str | None, prompt: PromptFormat, version: object) -> Rows:
    """The rows of what lies at `path` in this version."""

    def check(row: JsonObject) -> None:
        prompt.messages(row)

    return open_rows(path, split, check)


def _version_of(path: Path) -> tuple[int, ...]:
    """What differs after the file was written again."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns

"""Open a data set as its options describe it, once per process."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from ludus.env.types import JsonObject

from ..options import PromptsOptions
from .files import open_rows
from .prompt_format import PromptFormat
from .row_tasks import RowTasks, count_test_rows
from .rows import Rows


def open_tasks(options: PromptsOptions, prompt: PromptFormat) -> RowTasks:
    """Open the tasks. Environments of one process share the rows.

    Raises:
        ConfigError: The data set does not exist or is invalid.
    """
    rows = _open_shared(options.path, options.split, prompt)
    test_rows = None
    if options.has_separate_test:
        test_path = options.test_path or options.path
        test_rows = _open_shared(test_path, options.test_split, prompt)
    num_test_rows = count_test_rows(options.test_size, len(rows))
    return RowTasks(rows, test_rows, num_test_rows, options.seed)


def _open_shared(path: str, split: str | None, prompt: PromptFormat) -> Rows:
    absolute_path = Path(path).expanduser().absolute()
    return _open_version(absolute_path, split, prompt, _file_version(absolute_path))


@lru_cache(maxsize=8)
def _open_version(path: Path, split: str | None, prompt: PromptFormat, version: object) -> Rows:
    """Return the rows at `path`. The cache has one entry per version of the file."""

    def check(row: JsonObject) -> None:
        prompt.messages(row)

    return open_rows(path, split, check)


def _file_version(path: Path) -> tuple[int, ...]:
    """Return numbers that change when the file is written again."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns

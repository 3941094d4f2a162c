"""Data sets as their options describe them, each opened once per process."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError
from ludus.proto.paths import describe_place, parse_path, suggest_path

from ..options import PromptsOptions
from .files import open_rows
from .prompt_format import PromptFormat
from .row_tasks import RowTasks, count_test_rows
from .rows import Rows


def open_tasks(options: PromptsOptions, prompt_format: PromptFormat) -> RowTasks:
    """Open the tasks. Environments of one process share the rows.

    Raises:
        ConfigError: The data set does not exist or is invalid.
    """
    rows = _open_shared_rows(options.path, options.split, prompt_format)
    test_rows = None
    if options.has_separate_test:
        test_path = options.test_path or options.path
        test_rows = _open_shared_rows(test_path, options.test_split, prompt_format)
    num_test_rows = count_test_rows(options.test_size, len(rows))
    return RowTasks(rows, test_rows, num_test_rows, options.seed)


def _open_shared_rows(path: str, split: str | None, prompt_format: PromptFormat) -> Rows:
    absolute_path = parse_path(path).absolute()
    if not absolute_path.exists():
        raise ConfigError(
            f"path = '{path}' does not exist{describe_place(path)}; {suggest_path(path)}"
        )
    return _open_file_version(
        absolute_path, split, prompt_format, _read_file_version(absolute_path)
    )


@lru_cache(maxsize=8)
def _open_file_version(
    path: Path, split: str | None, prompt_format: PromptFormat, version: object
) -> Rows:
    """Return the rows at `path`. The cache has one entry per version of the file."""

    is_first = True

    def check_row(row: JsonObject) -> None:
        nonlocal is_first
        if is_first:
            prompt_format.check_first_row(row)
            is_first = False
        prompt_format.make_messages(row)

    return open_rows(path, split, check_row)


def _read_file_version(path: Path) -> tuple[int, ...]:
    """Return the inode, size and modification time of a file; () if it cannot be read."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns

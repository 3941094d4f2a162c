"""Output of the trainer: files that are written completely or not at all, and warnings."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ludus.env.text.terminal import format_notice

_log = logging.getLogger(__name__)

_TEMPORARY_SUFFIX = ".partial"
_OLD_SUFFIX = ".old"


def choose_temporary_path(path: Path) -> Path:
    """Return the path at which the new content of `path` is written before it replaces `path`."""
    return path.with_name(path.name + _TEMPORARY_SUFFIX)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that readers see either the whole old text or the whole new text."""
    temporary_file = choose_temporary_path(path)
    temporary_file.write_text(text, encoding="utf-8")
    os.replace(temporary_file, path)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` when the block succeeds."""
    temporary_folder = choose_temporary_path(folder)
    shutil.rmtree(temporary_folder, ignore_errors=True)
    temporary_folder.mkdir(parents=True)
    try:
        yield temporary_folder
        rename_folder(temporary_folder, folder)
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)


def rename_folder(folder: Path, target: Path) -> None:
    """Rename a folder to `target`, and delete the old target only afterwards."""
    old_target = target.with_name(target.name + _OLD_SUFFIX)
    shutil.rmtree(old_target, ignore_errors=True)
    if target.exists():
        os.replace(target, old_target)
    os.replace(folder, target)
    shutil.rmtree(old_target, ignore_errors=True)


def describe_write_error(path: Path, error: BaseException) -> str:
    """Return a message with the path, the reason and the free disk space."""
    existing_path = next(path for path in (path, *path.absolute().parents) if path.exists())
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    num_free_bytes = shutil.disk_usage(existing_path).free
    return f"'{path}' cannot be written: {reason}; {num_free_bytes:,} bytes are free there"


def warn_user(message: str) -> None:
    """Log a warning and print it on standard error, where `ludus` shows it to the user."""
    _log.warning("%s", message)
    sys.stderr.write(f"{format_notice('warning', message)}\n")

"""Folders that are written whole or not at all, and what is said where that fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `folder` once all is written."""
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def why_unwritten(path: Path, error: BaseException) -> str:
    """Which place cannot be written, why, and how much room there is."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    free = shutil.disk_usage(there).free
    return f"'{path}' cannot be written: {reason}; {free:,} bytes are free there"

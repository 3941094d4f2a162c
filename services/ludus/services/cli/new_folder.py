"""A new folder that a command writes: complete, or not at all."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from ludus.proto.errors import ConfigError
from ludus.proto.paths import expand_home

_TERMINATED_EXIT_CODE = 128 + signal.SIGTERM

Folder = Annotated[
    Path,
    typer.Argument(help="Folder to write; it must be empty or not exist.", callback=expand_home),
]


@contextmanager
def write_new_folder(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a folder that becomes `folder` if the block succeeds, and a folder for other files.

    Both are in the same parent folder, and are removed if the block fails or is interrupted.

    Raises:
        ConfigError: the folder contains files, or cannot be written.
    """
    _check_is_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with make_temporary_folder(folder) as temporary_folder:
            new_folder, work_folder = temporary_folder / "model", temporary_folder / "work"
            new_folder.mkdir()
            work_folder.mkdir()
            yield new_folder, work_folder
            _check_is_new(folder)
            os.replace(new_folder, folder)
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written: {error.strerror or error}; choose another folder, or "
            "make room"
        ) from error


@contextmanager
def make_temporary_folder(neighbor: Path) -> Iterator[Path]:
    """Yield a folder next to another one, on the same disk, and remove it after the block."""
    prefix, parent = f".{neighbor.name}-", neighbor.parent
    with (
        _exit_on_sigterm(),
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name,
    ):
        yield Path(name)


def _check_is_new(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.is_symlink() or folder.exists():
        content = "has files" if folder.is_dir() else "is not a folder"
        raise ConfigError(f"'{folder}' {content}; remove it, or choose another folder")


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """End the process on SIGTERM as on Ctrl-C, so that temporary files are removed."""

    def exit_process(signal_number: int, frame: FrameType | None) -> None:
        sys.exit(_TERMINATED_EXIT_CODE)

    previous_handler = signal.signal(signal.SIGTERM, exit_process)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)

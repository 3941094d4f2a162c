"""Tests of the lock of a run folder: exclusive use, and release when the owner exits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ludus.proto.errors import ConfigError
from ludus.proto.run_lock import LOCK_FILE, RunLock, is_in_use

_OWNER_PROGRAM = """
import sys
from pathlib import Path
from ludus.proto.run_lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def run_lock_owner(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run another process that owns the lock."""
    command = [sys.executable, "-c", _OWNER_PROGRAM, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_lock_error_names_the_owner_process(tmp_path: Path) -> None:
    with run_lock_owner(tmp_path) as process:
        assert is_in_use(tmp_path)
        with pytest.raises(ConfigError, match=rf"is in use: process {process.pid} on .* training"):
            RunLock.take(tmp_path)


@pytest.mark.slow
def test_lock_is_released_when_the_process_is_killed(tmp_path: Path) -> None:
    with run_lock_owner(tmp_path) as process:
        process.kill()
        process.wait()
        assert (tmp_path / LOCK_FILE).exists()
        assert not is_in_use(tmp_path)
        lock = RunLock.take(tmp_path)
    assert f"process {os.getpid()} " in (tmp_path / LOCK_FILE).read_text()
    lock.release()


def test_release_removes_the_file_and_can_be_repeated(tmp_path: Path) -> None:
    lock = RunLock.take(tmp_path)
    assert is_in_use(tmp_path)
    lock.release()
    lock.release()
    assert not is_in_use(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_second_release_does_not_affect_the_next_owner(tmp_path: Path) -> None:
    first_lock = RunLock.take(tmp_path)
    first_lock.release()
    second_lock = RunLock.take(tmp_path)
    first_lock.release()
    assert is_in_use(tmp_path)
    second_lock.release()

"""One process writes into a run's folder; who dies lets go of it."""

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

_HOLDER = """
import sys
from pathlib import Path
from ludus.proto.run_lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has the lock."""
    command = [sys.executable, "-c", _HOLDER, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def test_a_folder_in_use_is_refused_and_its_holder_named(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        assert is_in_use(tmp_path)
        with pytest.raises(ConfigError, match=rf"is in use: process {process.pid} on .* trains"):
            RunLock.take(tmp_path)


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        assert (tmp_path / LOCK_FILE).exists()
        assert not is_in_use(tmp_path)
        lock = RunLock.take(tmp_path)
    assert f"process {os.getpid()} " in (tmp_path / LOCK_FILE).read_text()
    lock.release()


def test_a_lock_that_is_released_leaves_no_file_and_may_be_released_twice(tmp_path: Path) -> None:
    lock = RunLock.take(tmp_path)
    assert is_in_use(tmp_path)
    lock.release()
    lock.release()
    assert not is_in_use(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_release_after_the_next_has_taken_it_takes_nothing_away(tmp_path: Path) -> None:
    first = RunLock.take(tmp_path)
    first.release()
    second = RunLock.take(tmp_path)
    first.release()
    assert is_in_use(tmp_path)
    second.release()

"""What every test stands on: kept bytecode, repeatable examples, files in order."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

import grpc
import pytest
from hypothesis import settings

# The tests start hundreds of Python processes. Where nothing compiled may be kept, each of them
# compiles the whole SDK again, which takes longer than most tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tiny models want one thread: more only wait for each other, and for the other processes'.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine must not fail a test, and two runs must draw the same examples.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=25)
settings.load_profile("repeatable")

WHOLE_RUNS = ("tests/e2e/", "tests/chaos/test_faults.py")
"""Tests that take long and share no fixture: each may go to another process than its neighbours."""


WHOLLY_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that have slow tests alone: each process would import what they need."""
    if collection_path.suffix != ".py" or "not slow" not in config.option.markexpr:
        return None
    return WHOLLY_SLOW.search(collection_path.read_text(encoding="utf-8")) is not None or None


def pytest_configure() -> None:
    # With the last of its objects gRPC's engine ends, and waits for ever for calls whose event loop
    # is closed: a server that one test left running would stop whichever test collects it.
    grpc.aio.init_grpc_aio()
    # An import makes objects that stay; to look through them again and again finds nothing.
    gc.disable()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep how it ended for dev/test_again.py: a part is enough only where all tests ran."""
    if not hasattr(session.config, "workerinput") and hasattr(session.config, "cache"):
        session.config.cache.set("ludus/exit_status", int(exitstatus))


def pytest_collection_finish() -> None:
    """Collect garbage again, but none of what the imports have made."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put whole runs and slow files first, in turns; fast ones fill what is left at the end.

    A whole run keeps more than a core busy, and a slow file mostly waits for what it has started:
    beside each other they take the least time.
    """
    whole = dict.fromkeys(item.path for item in items if item.nodeid.startswith(WHOLE_RUNS))
    slow = dict.fromkeys(item.path for item in items if item.get_closest_marker("slow"))
    waiting = [path for path in slow if path not in whole]
    place = {
        path: (number + 0.5) / len(files)
        for files in (whole, waiting)
        for number, path in enumerate(files)
    }
    items.sort(key=lambda item: place.get(item.path, 1.0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """The scheduler of `-n`: a file stays in one process, with the servers that its tests share."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(WHOLE_RUNS) else nodeid.partition("::")[0]

    return ByFile(config, log)

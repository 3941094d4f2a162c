"""Shared settings of all tests: cached bytecode, repeatable examples and the order of files."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The tests start hundreds of Python processes. Without cached bytecode, each process would compile
# the whole SDK, which takes longer than most tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The SDK sets it too. Handlers of forks in gRPC crash some children.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# Tiny models need one thread. More threads only wait for each other and for other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine must not make a test fail, and every run must use the same examples.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=25)
settings.load_profile("repeatable")

WHOLE_RUN_PREFIXES = ("tests/e2e/", "tests/chaos/test_faults.py")
"""Path prefixes of long tests. They share no fixtures, so each may run in a separate process."""

SLOW_FILE_PATTERN = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files that contain only slow tests, because their imports would delay every process."""
    if collection_path.suffix != ".py" or "not slow" not in config.option.markexpr:
        return None
    return SLOW_FILE_PATTERN.search(collection_path.read_text(encoding="utf-8")) is not None or None


def pytest_configure() -> None:
    import grpc  # reads its variables when it is imported
    import setuptools  # noqa: F401  # vLLM imports it, which fails after some other modules

    # Without this reference, gRPC shuts down when its last object is deleted, and waits forever for
    # calls whose event loop is closed. Garbage collection of a server that a test left running
    # would then block another test.
    grpc.aio.init_grpc_aio()
    # Imported objects are never garbage, so collection during imports would waste time.
    gc.disable()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Record the exit status for dev/test_again.py, which needs a complete run."""
    if not hasattr(session.config, "workerinput") and hasattr(session.config, "cache"):
        session.config.cache.set("ludus/exit_status", int(exitstatus))


def pytest_collection_finish() -> None:
    """Enable garbage collection again, but exclude the imported objects."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Alternate whole runs and slow files, and put fast files last.

    A whole run uses more than one core, and a slow file mostly waits for the processes that it
    starts. Running the two concurrently takes the least time.
    """
    whole_runs = dict.fromkeys(
        item.path for item in items if item.nodeid.startswith(WHOLE_RUN_PREFIXES)
    )
    slow_files = dict.fromkeys(item.path for item in items if item.get_closest_marker("slow"))
    other_slow_files = [path for path in slow_files if path not in whole_runs]
    priorities = {
        path: (index + 0.5) / len(files)
        for files in (whole_runs, other_slow_files)
        for index, path in enumerate(files)
    }
    items.sort(key=lambda item: priorities.get(item.path, 1.0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Return a scheduler for `-n` that runs each file in one process, with its shared servers."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(WHOLE_RUN_PREFIXES) else nodeid.partition("::")[0]

    return FileScheduler(config, log)

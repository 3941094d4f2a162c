"""Ray cluster that several runs share, because starting Ray takes longer than a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

RAY_PROGRAM = """
import sys
import ray

# For Ray, CPUs are only a count, so this number may be larger than the machine's.
ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Start Ray for the tests of this process; yield its address."""
    for _ in range(2):  # on a busy machine, Ray may need longer than its timeout of 30 s
        with subprocess.Popen(
            [sys.executable, "-c", RAY_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            if address := process.stdout.readline().strip():
                yield address
                process.stdin.close()
                return
    pytest.fail("Ray did not start")


@pytest.fixture
def shared_ray(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect the runs of a test to the shared Ray, with its token."""
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")

"""The life of a long-running server process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

START = """
import asyncio, os, random, signal
from pathlib import Path
from ludus.env import runtime

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

class Service:
    num_sessions = 0
    async def __aenter__(self):
        return self
    async def __aexit__(self, *_):
        pass
    def drain(self):
        pass
"""

BURST = """
runtime._TRIM_PERIOD_S = 0.1

def burst():
    draw = random.Random(1)
    before = resident()
    blocks = [bytes(draw.choice((600, 900, 3000))) for _ in range(60_000)]
    full = resident() - before
    kept = blocks[::50]
    del blocks
    asyncio.get_running_loop().call_later(0.5, tell, before, full, kept)

def tell(before, full, kept):
    print(full, resident() - before, flush=True)
    os.kill(os.getpid(), signal.SIGINT)

runtime.run_until_signal(Service(), drain_grace_s=0, on_ready=burst)
"""

LARGE = """
def large():
    bytes(2_000_000)  # freeing it would raise glibc's mmap threshold
    before = resident()
    blocks, small = [], []
    for _ in range(40):
        blocks.append(b"x" * 1_000_000)
        small.append(bytes(3000))
    full = resident() - before
    del blocks
    print(full, resident() - before, flush=True)
    os.kill(os.getpid(), signal.SIGINT)

runtime.run_until_signal(Service(), drain_grace_s=0, on_ready=large)
"""


def measure_glibc(program: str) -> tuple[int, int]:
    """Return the peak and the remaining memory in bytes."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("only glibc can trim")
    command = [sys.executable, "-c", START + program]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    full, remaining = map(int, ran.stdout.split())
    return full, remaining


@pytest.mark.slow
def test_memory_of_a_burst_is_returned() -> None:
    full, remaining = measure_glibc(BURST)
    # One block in fifty stays allocated, with its page of 4 KiB.
    assert remaining < full / 4


@pytest.mark.slow
def test_memory_of_a_large_message_is_returned_at_once() -> None:
    full, remaining = measure_glibc(LARGE)
    assert remaining < full / 10


def test_collection_is_paused_for_a_block_and_its_objects_are_frozen() -> None:
    program = (
        "import gc\n"
        "from ludus.env.runtime import pause_collection\n"
        "before = gc.get_freeze_count()\n"
        "with pause_collection():\n"
        "    kept = [[] for _ in range(10_000)]\n"
        "    print(gc.isenabled())\n"
        "print(gc.isenabled(), gc.get_freeze_count() - before >= 10_000)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.split() == ["False", "True", "True"], run.stderr

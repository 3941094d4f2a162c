"""Memory and garbage collection of a long-running server process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROGRAM_PREFIX = """
import asyncio, os, random, signal
from pathlib import Path
from ludus.env import runtime

def read_resident_bytes():
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

BURST_PROGRAM = """
runtime._TRIM_PERIOD_S = 0.1

def allocate_burst():
    generator = random.Random(1)
    initial_bytes = read_resident_bytes()
    blocks = [bytes(generator.choice((600, 900, 3000))) for _ in range(60_000)]
    peak_bytes = read_resident_bytes() - initial_bytes
    live_blocks = blocks[::50]
    del blocks
    asyncio.get_running_loop().call_later(0.5, report, initial_bytes, peak_bytes, live_blocks)

def report(initial_bytes, peak_bytes, live_blocks):
    print(peak_bytes, read_resident_bytes() - initial_bytes, flush=True)
    os.kill(os.getpid(), signal.SIGINT)

runtime.run_until_signal(Service(), drain_grace_s=0, on_ready=allocate_burst)
"""

LARGE_MESSAGE_PROGRAM = """
def allocate_large_blocks():
    bytes(2_000_000)  # freeing a large block raises glibc's mmap threshold unless it is fixed
    initial_bytes = read_resident_bytes()
    blocks, small_blocks = [], []
    for _ in range(40):
        blocks.append(b"x" * 1_000_000)
        small_blocks.append(bytes(3000))
    peak_bytes = read_resident_bytes() - initial_bytes
    del blocks
    print(peak_bytes, read_resident_bytes() - initial_bytes, flush=True)
    os.kill(os.getpid(), signal.SIGINT)

runtime.run_until_signal(Service(), drain_grace_s=0, on_ready=allocate_large_blocks)
"""


def measure_memory(program: str) -> tuple[int, int]:
    """Run a program; return its additional memory at the peak and at the end, in bytes."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("malloc_trim exists only in glibc")
    command = [sys.executable, "-c", PROGRAM_PREFIX + program]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    peak_bytes, final_bytes = map(int, process.stdout.split())
    return peak_bytes, final_bytes


@pytest.mark.slow
def test_memory_is_released_after_a_burst() -> None:
    peak_bytes, final_bytes = measure_memory(BURST_PROGRAM)
    # One block in fifty stays allocated and keeps a page of 4 KiB resident.
    assert final_bytes < peak_bytes / 4


@pytest.mark.slow
def test_memory_of_a_large_message_is_released_immediately() -> None:
    peak_bytes, final_bytes = measure_memory(LARGE_MESSAGE_PROGRAM)
    assert final_bytes < peak_bytes / 10


@pytest.mark.slow
def test_pause_collection_disables_gc_and_then_freezes_live_objects() -> None:
    program = (
        "import gc\n"
        "from ludus.env.runtime import pause_collection\n"
        "num_frozen = gc.get_freeze_count()\n"
        "with pause_collection():\n"
        "    live_objects = [[] for _ in range(10_000)]\n"
        "    print(gc.isenabled())\n"
        "print(gc.isenabled(), gc.get_freeze_count() - num_frozen >= 10_000)\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.stdout.split() == ["False", "True", "True"], process.stderr

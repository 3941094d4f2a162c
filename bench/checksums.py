"""The time to hash a checkpoint, compared with the time to write it.

    python bench/checksums.py [--megabytes 200]

The state is written as the learner writes it, by one rank, to a temporary folder.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from ludus.trainer.core.checksums import hash_file

NUM_TENSORS = 40
NUM_REPETITIONS = 3


def hash_with_sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measure_s(function: Callable[[], object]) -> float:
    """Return the shortest time of several calls."""
    times_s: list[float] = []
    for _ in range(NUM_REPETITIONS):
        start_s = time.perf_counter()
        function()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200, help="size of the state")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    num_elements = args.megabytes * 250_000 // NUM_TENSORS
    state = {f"weight_{index}": torch.randn(num_elements) for index in range(NUM_TENSORS)}
    with tempfile.TemporaryDirectory() as folder:
        write_s = measure_s(lambda: dcp.save(state, checkpoint_id=folder))
        paths = list(Path(folder).iterdir())
        blake3_s = measure_s(lambda: list(map(hash_file, paths)))
        sha256_s = measure_s(lambda: list(map(hash_with_sha256, paths)))
    sys.stdout.write(f"write {write_s:.2f} s, BLAKE3 {blake3_s:.2f} s, SHA-256 {sha256_s:.2f} s\n")


if __name__ == "__main__":
    main()

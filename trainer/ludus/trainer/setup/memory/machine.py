"""The memory of the GPUs and of the nodes on which a run is to start."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from ludus.proto.config import PlacementConfig

GIB, MIB, KIB = 2**30, 2**20, 2**10
_GPU_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
"""Command that prints the memory of each GPU in MiB. Asking torch would use memory of the GPU."""
_QUERY_TIMEOUT_S = 10
_MEMORY_FILE = Path("/proc/meminfo")
_LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Limits of the control group, of which a pod sees its own."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory that a run can use, in bytes."""

    gpu_bytes: int | None
    """Memory of a GPU; None if it is unknown."""
    node_bytes: int | None
    """Main memory of a node, with swap space; None if it is unknown."""
    is_whole_run: bool
    """True if all actors run on one node."""
    has_several_gpus: bool = False
    """True if the node may have several GPUs, so that actors need not share one."""


def read_machine(placement: PlacementConfig, *, is_local: bool, uses_gpus: bool) -> Machine:
    """Return the configured memory, and otherwise that of this machine for a local run."""
    gpu_gib, node_gib = placement.gpu_memory_gib, placement.node_memory_gib
    gpu_bytes = None if gpu_gib is None else int(gpu_gib * GIB)
    node_bytes = None if node_gib is None else int(node_gib * GIB)
    if is_local and uses_gpus and gpu_bytes is None:
        gpu_bytes = read_gpu_bytes()
    if is_local and node_bytes is None:
        node_bytes = read_main_memory()
    num_gpus = torch.cuda.device_count() if is_local and uses_gpus else 0
    return Machine(gpu_bytes, node_bytes, is_local, not is_local or num_gpus > 1)


def read_gpu_bytes() -> int | None:
    """Return the memory of the largest GPU of this machine; None if there is none to ask."""
    try:
        result = subprocess.run(
            _GPU_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(line) for line in result.stdout.split() if line.isdecimal()]
    return max(sizes) * MIB if sizes else None


def read_main_memory() -> int | None:
    """Return the memory and swap space of this machine or pod; None if they are unknown."""
    limits = []
    try:
        fields = dict(line.split(":", 1) for line in _MEMORY_FILE.read_text().splitlines())
        sizes = [int(fields[name].split()[0]) for name in ("MemTotal", "SwapTotal")]
        limits.append(sum(sizes) * KIB)
    except (OSError, KeyError, ValueError):
        pass
    for path in _LIMIT_FILES:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits, default=None)

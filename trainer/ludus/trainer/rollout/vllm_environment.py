"""The variables that make vLLM run quietly inside the process that uses it.

vLLM and torch read them once, while they are imported, so they must stand in the process
before: Ray puts them there through `runtime_env`, anything else calls `prepare_process`.
"""

from __future__ import annotations

import os
import sys

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Set to "0" in a process that was prepared."""


def vllm_environment(num_threads: int, *, on_gpu: bool = False) -> dict[str, str]:
    """The environment variables of a process that will hold a vLLM engine."""
    variables = {
        IN_PROCESS: "0",
        # The engine runs in a thread whose OpenMP pool only this variable can size.
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if sys.platform == "linux":
        # torch.distributed must not look for the address of a host that may have none.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if not on_gpu:
        # Whoever started the process decides on which cores it runs.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Otherwise the first log-prob waits for a C++ compiler, for one line of tensor code.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def prepare_process(num_threads: int, *, on_gpu: bool = False) -> None:
    """Set those variables that are not set yet. Call it before torch is imported."""
    for name, value in vllm_environment(num_threads, on_gpu=on_gpu).items():
        os.environ.setdefault(name, value)

"""The environment variables of a process that runs vLLM.

vLLM and torch read them while they are imported, so the variables must be set earlier: Ray sets
them through `runtime_env`, other programs call `prepare_process`.
"""

from __future__ import annotations

import importlib.util
import os
import sys

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Name of the variable that is "0" in a prepared process."""


def vllm_environment(num_threads: int, *, on_gpu: bool = False) -> dict[str, str]:
    """Return the environment variables of a process with a vLLM engine."""
    variables = {
        IN_PROCESS: "0",
        # Only this variable sets the size of the OpenMP pool of the engine's thread.
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if sys.platform == "linux":
        # torch.distributed must not look up the host's address, which may not exist.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if not on_gpu:
        # The parent process chooses the cores.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Otherwise torch starts a C++ compiler for the first log-prob.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def prepare_process(num_threads: int, *, on_gpu: bool = False) -> None:
    """Set the variables that are not set yet; must be called before torch is imported."""
    for name, value in vllm_environment(num_threads, on_gpu=on_gpu).items():
        os.environ.setdefault(name, value)


def has_vllm() -> bool:
    """Return whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None

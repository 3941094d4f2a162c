"""The environment variables of a process that runs vLLM.

vLLM and torch read the variables when they are imported, so the variables must be set before. Ray
sets them through `runtime_env`; other programs call `prepare_process`.
"""

from __future__ import annotations

import importlib.util
import os
import sys

MULTIPROCESSING_VARIABLE = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Name of the variable that must be "0" in a process with a vLLM engine."""


def make_vllm_variables(num_threads: int, *, uses_gpu: bool = False) -> dict[str, str]:
    """Return the environment variables of a process with a vLLM engine."""
    variables = {
        MULTIPROCESSING_VARIABLE: "0",
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
    if not uses_gpu:
        # vLLM must not bind threads to cores, because the parent process chooses the cores.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Otherwise torch starts a C++ compiler for the first log-prob.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def prepare_process(num_threads: int, *, uses_gpu: bool = False) -> None:
    """Set the variables that are not set yet. Call this before torch is imported."""
    for name, value in make_vllm_variables(num_threads, uses_gpu=uses_gpu).items():
        os.environ.setdefault(name, value)


def is_vllm_installed() -> bool:
    """Return whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None

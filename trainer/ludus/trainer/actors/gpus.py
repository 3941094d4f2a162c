"""The GPUs that the process of an actor sees: exactly those that Ray reserved for the actor.

Ray shows a process all GPUs of the machine if the actor reserved none, and always if
RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set. All workers would then use the first GPU, and
two ranks could select the same GPU, which NCCL refuses.
"""

from __future__ import annotations

import os

import ray

_VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def limit_visible_gpus() -> None:
    """Show this process only its reserved GPUs; call this before anything uses CUDA."""
    if not ray.is_initialized():  # a test without Ray
        return
    gpu_ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    os.environ[_VISIBLE_DEVICES_VARIABLE] = ",".join(gpu_ids)


def use_expandable_segments() -> None:
    """Let torch extend its memory segments, unless a variable configures the allocator of torch.

    The shapes of rows differ between micro-batches, which would fragment segments of fixed size.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"

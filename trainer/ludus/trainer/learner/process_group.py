"""The device of a rank, and the clean exit from a process group.

DTensor's sharding caches reference the mesh, the mesh references the group, and gloo's threads run
as long as the group is referenced, so `destroy_process_group` alone stops none of them. If they
still run while Python shuts down, the process may abort ("terminate called without an active
exception").
"""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ludus.trainer.core.devices import choose_reserved_device


def select_device(num_gpus: float) -> torch.device:
    """Select and return the GPU of this rank; return the CPU if the rank has no GPU.

    Call this before the ranks connect. If no device is set, a DeviceMesh selects the device with
    the number LOCAL_RANK, which is wrong here, because Ray shows each actor only its own device.

    Args:
        num_gpus: the configured number of GPUs of a rank.

    Raises:
        ConfigError: torch cannot use the GPU.
    """
    os.environ.pop("LOCAL_RANK", None)
    device = choose_reserved_device(num_gpus, "learner.num_gpus_per_rank")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def leave_process_group() -> None:
    """Leave the group and stop its threads; the caller must have dropped its sharded models."""
    dist.destroy_process_group()
    _clear_sharding_prop_cache()
    gc.unfreeze()  # imports and starts freeze all objects, also those of the group
    gc.collect()

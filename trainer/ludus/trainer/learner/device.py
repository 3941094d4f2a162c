"""Choice of the device on which a learner rank computes."""

from __future__ import annotations

import os

import torch


def select_device(rank: int) -> torch.device:
    """Select the GPU that Ray gave this process as torch's device, and return it; else the CPU.

    Call this before the ranks connect. A DeviceMesh sets a device if none is set: the one with
    number LOCAL_RANK on the node, although Ray shows each actor only the actor's own device.
    """
    os.environ.pop("LOCAL_RANK", None)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device

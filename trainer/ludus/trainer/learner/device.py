"""Which device a learner rank computes on."""

from __future__ import annotations

import os

import torch


def take_device(rank: int) -> torch.device:
    """The GPU that Ray gave this process, from now on torch's own, else the CPU.

    To be called before the ranks meet. A DeviceMesh sets a device where none is set: the one that
    LOCAL_RANK counts among all of the node, of which Ray shows each actor its own alone.
    """
    os.environ.pop("LOCAL_RANK", None)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device

"""The device and the number of threads that torch uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ludus.proto.errors import ConfigError

MIN_WIDTH_FOR_THREADS = 256
"""Width of a model from which several threads are faster than one."""


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the device after checking that torch can use it.

    None selects a GPU if there is one, and the CPU otherwise.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(1, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device = '{device}' cannot be used: {reason}; use 'cpu', or one of the "
            f"{torch.cuda.device_count()} GPUs of this machine"
        ) from error


def choose_reserved_device(num_gpus: float, setting: str) -> torch.device:
    """Return the only GPU that this process sees, or the CPU if the process reserves no GPU.

    Args:
        num_gpus: the configured number of GPUs of the process.
        setting: name of the setting that contains the number, for messages.

    Raises:
        ConfigError: torch cannot use the GPU.
    """
    if num_gpus == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{setting} = {num_gpus:g}, but torch {torch.__version__} finds no GPU in the process "
            "that reserved it; install the CUDA build of torch (docs/installation.md), or set "
            f"{setting} = 0"
        )
    return torch.device("cuda", 0)


@contextmanager
def use_torch_threads(num_threads: int) -> Iterator[None]:
    """Set the number of torch threads within the block, and restore it afterwards."""
    num_threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads_before)

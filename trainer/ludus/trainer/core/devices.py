"""torch's devices and threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ludus.proto.errors import ConfigError


def choose_device(name: str | torch.device | None) -> torch.device:
    """Return the device with this name. None takes a GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device = '{name}' cannot be used: {reason}; use 'cpu', or one of the "
            f"{torch.cuda.device_count()} GPUs of this machine"
        ) from error


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Set the number of torch threads within the block."""
    previous_num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous_num_threads)

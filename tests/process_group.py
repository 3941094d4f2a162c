"""A process group of this process alone, for code that uses collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def open_single_rank_group(folder: Path) -> Iterator[None]:
    """Create a gloo process group whose only rank is this process, and set one thread.

    A process has one default group, so a fixture must not keep it open longer than one module:
    the next module of the same process may create its own.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()

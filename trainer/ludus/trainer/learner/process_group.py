"""The end of a process group in a process that goes on, or that ends by itself.

DTensor's caches of shardings hold the mesh, the mesh holds the group, and gloo's threads run for as
long as the group is held: `destroy_process_group` alone ends none of them. A process in which they
still run while Python is taken down may be aborted ("terminate called without an active
exception").
"""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def leave_process_group() -> None:
    """Leave the group, and end its threads; whoever calls holds no sharded model any more."""
    dist.destroy_process_group()
    _clear_sharding_prop_cache()
    gc.collect()

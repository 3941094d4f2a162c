"""A clean end of a process group.

DTensor's sharding caches reference the mesh, the mesh references the group, and gloo's threads run
as long as the group is referenced, so `destroy_process_group` alone stops none of them. If they
still run while Python shuts down, the process may abort ("terminate called without an active
exception").
"""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def leave_process_group() -> None:
    """Leave the group and stop its threads; the caller must have dropped its sharded models."""
    dist.destroy_process_group()
    _clear_sharding_prop_cache()
    gc.collect()

"""The peak of the memory of tensors, measured without the allocator of a device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryPeak(TorchDispatchMode):
    """The peak of the memory of all tensors that are created within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.peak_bytes = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) not in inputs:
                self._track(tensor.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._storages:
            return
        self._storages.add(address)
        self.num_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._storages.discard(address)
        self.num_bytes -= size

"""Adam over flat copies of parameters: small tensors cost more to visit than to compute.

    parameters --views of--> one tensor for each group and type --> a few kernels a step

torch.optim.Adam computes the same (`tests/classic/test_classic_ppo.py`); its first call imports a
compiler, which takes longer than some of these runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_BETAS = (0.9, 0.999)
_EPS = 1e-5
_NORM_EPS = 1e-6


class Adam:
    """Adam (arXiv 1412.6980) for groups of parameters, which it lays out anew in memory."""

    def __init__(self, groups: Sequence[Iterable[nn.Parameter]]) -> None:
        self._flats = [
            _Flat(index, [p for p in group if p.dtype is dtype])
            for index, group in enumerate(map(list, groups))
            for dtype in dict.fromkeys(p.dtype for p in group)
        ]
        self._num_steps = 0

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for flat in self._flats:
            flat.grad.zero_()

    def clip(self, max_norm: float) -> Tensor:
        """The norm of all gradients together, which are then scaled down to `max_norm`."""
        norms = [torch.linalg.vector_norm(flat.grad) for flat in self._flats]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        scale = (max_norm / (norm + _NORM_EPS)).clamp(max=1.0)
        for flat in self._flats:
            flat.grad.mul_(scale)
        return norm

    def step(self, rates: Sequence[float]) -> None:
        """Take a step with a learning rate for each group."""
        self._num_steps += 1
        corrections = [1 - beta**self._num_steps for beta in _BETAS]
        for flat in self._flats:
            flat.step(rates[flat.group], corrections)

    def state(self) -> dict[str, Any]:
        """All of it but the parameters."""
        moments = [{"mean": flat.mean, "square": flat.square} for flat in self._flats]
        return {"num_steps": self._num_steps, "moments": moments}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self._num_steps = state["num_steps"]
        for flat, moments in zip(self._flats, state["moments"], strict=True):
            flat.mean.copy_(moments["mean"])
            flat.square.copy_(moments["square"])


class _Flat:
    """Parameters of one group and type, side by side."""

    def __init__(self, group: int, parameters: Sequence[nn.Parameter]) -> None:
        self.group = group
        self.values = torch.cat([p.detach().flatten() for p in parameters])
        self.grad = torch.zeros_like(self.values)
        self.mean, self.square = torch.zeros_like(self.grad), torch.zeros_like(self.grad)
        begin = 0
        for parameter in parameters:
            end = begin + parameter.numel()
            parameter.data = self.values[begin:end].view_as(parameter)
            parameter.grad = self.grad[begin:end].view_as(parameter)
            begin = end

    @torch.no_grad()
    def step(self, rate: float, corrections: Sequence[float]) -> None:
        self.mean.lerp_(self.grad, 1 - _BETAS[0])
        self.square.mul_(_BETAS[1]).addcmul_(self.grad, self.grad, value=1 - _BETAS[1])
        scale = (self.square / corrections[1]).sqrt_().add_(_EPS)
        self.values.addcdiv_(self.mean, scale, value=-rate / corrections[0])

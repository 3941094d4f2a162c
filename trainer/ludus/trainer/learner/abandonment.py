"""The end of a training step before its last update, on all ranks at the same micro-batch.

    driver --request--> a rank --check, before a micro-batch--> all ranks agree --> StepAbandoned,
                                                                with the state before the step

Before its first update, a step has not changed the state. Later, the state comes from a restore
point: a copy of the weights and the optimizer state in main memory, which costs as much memory as a
checkpoint. Without a restore point, such a step ends early only if its state may be discarded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_MAX_CHECKS = 16
"""Maximum number of times per step that several ranks compare their requests."""


@dataclass(frozen=True, slots=True)
class AbandonedStep:
    """The outcome of a step that ended early."""

    is_restored: bool
    """True if the learner has the state from before the step; otherwise its state is useless."""


class StepAbandonedError(Exception):
    """A step ended early, because the driver requested it."""

    def __init__(self, outcome: AbandonedStep) -> None:
        super().__init__("the step was abandoned")
        self.outcome = outcome


class StepAbandonment:
    """Requests to abandon a step, and the state to which the learner then returns.

    Only `request` may be called from another thread.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, num_ranks: int
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._num_ranks = num_ranks
        self._request_by_step: dict[int, int] = {}
        self._step_id = 0
        self._num_checks = 0
        self._check_interval = 1
        self._num_updates = 0
        self._restore_point: RestorePoint | None = None

    def request(self, step_id: int, *, discards_state: bool) -> None:
        """Request to abandon a step, which may be running, finished, or about to start.

        Args:
            discards_state: whether to abandon the step even if its state cannot be restored.
        """
        self._request_by_step[step_id] = 2 if discards_state else 1

    def begin_step(
        self, step_id: int, *, num_micro_batches: int, keeps_restore_point: bool
    ) -> None:
        """Begin a step; all ranks pass equal arguments."""
        self._step_id, self._num_checks, self._num_updates = step_id, 0, 0
        self._check_interval = 1
        if self._num_ranks > 1:
            self._check_interval = math.ceil(num_micro_batches / _MAX_CHECKS)
        self._restore_point = RestorePoint(self._optimizer) if keeps_restore_point else None

    def end_step(self) -> None:
        """Free the restore point."""
        self._restore_point = None
        self._request_by_step.clear()

    def count_update(self) -> None:
        """Count an update of the weights in this step."""
        self._num_updates += 1

    def check(self) -> None:
        """Abandon the step if it was requested; all ranks call this before each micro-batch.

        Raises:
            StepAbandonedError: the step is abandoned.
        """
        self._num_checks += 1
        if (self._num_checks - 1) % self._check_interval:
            return
        request = self._request_by_step.get(self._step_id, 0)
        if self._num_ranks > 1:
            shared_request = torch.tensor(request, device=self._device)
            dist.all_reduce(shared_request, dist.ReduceOp.MAX)
            request = int(shared_request)
        can_restore = self._num_updates == 0 or self._restore_point is not None
        if request == 0 or (request == 1 and not can_restore):
            return
        self._optimizer.zero_grad(set_to_none=True)
        if self._num_updates > 0 and self._restore_point is not None:
            self._restore_point.restore()
        raise StepAbandonedError(AbandonedStep(can_restore))


class RestorePoint:
    """A copy of the weights and the optimizer state of this rank."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._has_state = set(optimizer.state)
        self._copies = [
            (tensor, _get_local_part(tensor).detach().to("cpu", copy=True))
            for tensor in _list_tensors(optimizer)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the weights and the optimizer state to the copied values."""
        for tensor, values in self._copies:
            _get_local_part(tensor).copy_(values)
        for parameter in set(self._optimizer.state) - self._has_state:
            del self._optimizer.state[parameter]


def _list_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _get_local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

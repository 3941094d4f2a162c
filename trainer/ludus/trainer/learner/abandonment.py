"""The end of a training step before its last update, on all ranks at the same micro-batch.

    driver --request--> a rank --check, before a micro-batch--> all ranks agree --> StepAbandoned,
                                                                with the state before the step

Before its first update, a step has not changed the state. Later, the state comes from a restore
point: a copy of the weights and the optimizer state in main memory, which costs as much memory as a
checkpoint. Without a restore point, such a step ends early only if its state may be discarded.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
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

    Only `request` and `copy_start` may be called from another thread.
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
        """Free the restore point; the next step starts with the current state."""
        self._restore_point, self._num_updates = None, 0
        self._request_by_step.clear()

    def count_update(self) -> None:
        """Count an update of the weights in this step; call this before the update."""
        self._num_updates += 1

    def copy_start(self) -> RestorePoint | None:
        """Return the state from before the current step, which may be stuck in a collective.

        Returns:
            None if the step has changed the weights and keeps no restore point.
        """
        restore_point = self._restore_point
        if restore_point is None and self._num_updates == 0:
            with _use_another_stream(self._device):
                restore_point = RestorePoint(self._optimizer)
            if self._num_updates:  # an update began while the state was copied
                return None
        return restore_point

    def restore(self, restore_point: RestorePoint) -> None:
        """Return to the state that `copy_start` returned in an earlier process of this rank."""
        restore_point.restore(self._optimizer)

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
            self._restore_point.restore(self._optimizer)
        raise StepAbandonedError(AbandonedStep(can_restore))


class RestorePoint:
    """A copy of this rank's weights, optimizer state and random state, in main memory.

    Another process of the same rank can restore it, because it refers to no optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._random_state = torch.get_rng_state()
        self._weights = [_copy_to_cpu(parameter) for parameter in _list_parameters(optimizer)]
        self._states = [
            {
                name: _copy_to_cpu(value)
                for name, value in optimizer.state.get(parameter, {}).items()
            }
            for parameter in _list_parameters(optimizer)
        ]

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the weights, the optimizer state and the random state to the copied values."""
        torch.set_rng_state(self._random_state)
        parameters = _list_parameters(optimizer)
        for parameter, weights, values in zip(parameters, self._weights, self._states, strict=True):
            _get_local_part(parameter).copy_(weights)
            if not values:
                optimizer.state.pop(parameter, None)
            for name, value in values.items():
                state = optimizer.state[parameter]
                if name not in state:
                    # Only the number of steps is a scalar, which is not sharded.
                    state[name] = torch.zeros_like(
                        parameter if value.dim() else value, device=parameter.device
                    )
                _get_local_part(state[name]).copy_(value)


def _use_another_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context whose copies from a GPU do not wait for the operations of other threads."""
    if device.type == "cpu":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def _list_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return _get_local_part(tensor).detach().to("cpu", copy=True)


def _get_local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

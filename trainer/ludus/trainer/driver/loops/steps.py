"""A training step's result, and the gate at which the training loop waits between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from ludus.proto.runs import EvalReport, Transcript


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a training step."""

    number: int
    """Number of steps trained so far."""
    values: Mapping[str, float]
    """Values of this step over all environments, by TrainMetric (docs/metrics.md)."""
    environments: Mapping[str, Mapping[str, float]]
    """Values of this step in each environment, by TrainMetric and by reward term."""
    transcripts: tuple[Transcript, ...]
    """Some of the episodes in the batch."""
    evaluation: Mapping[str, EvalReport] | None
    """Evaluation by environment; None if there was no evaluation after this step."""


class StepGate:
    """The gate between the training loop and a program that iterates over its steps.

    The training loop waits at the gate after each step until the program requests the next step,
    or opens the gate.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._request_event = asyncio.Event()
        self._steps: asyncio.Queue[Step | None] = asyncio.Queue()
        self._is_open = is_open
        self.is_waiting = False
        """True while the training loop waits here."""
        self.has_reported_end = False
        """True after the program was informed about the end of training."""

    def open(self) -> None:
        """Let the training loop pass without waiting from now on."""
        self._is_open = True
        self._request_step()

    async def wait(self, step: Step | None) -> None:
        """Give `step` to the program and wait for its next request, unless the gate is open."""
        if self._is_open:
            return
        self._steps.put_nowait(step)
        self.is_waiting = True
        await self._request_event.wait()
        self._request_event.clear()

    async def receive(self, training_task: asyncio.Task[None]) -> Step | None:
        """Return the next step. None means that the loop is ready for step 1, or that it has ended.

        Raises:
            BaseException: the failure of `training_task`.
        """
        receive_task = asyncio.ensure_future(self._steps.get())
        try:
            await asyncio.wait([receive_task, training_task], return_when=asyncio.FIRST_COMPLETED)
            if receive_task.done():
                return receive_task.result()
        finally:
            receive_task.cancel()
        self.has_reported_end = True
        await training_task
        return None

    async def request_next(self, training_task: asyncio.Task[None]) -> Step | None:
        """Request the next step and return it; None after the last step."""
        self._request_step()
        return await self.receive(training_task)

    def _request_step(self) -> None:
        # Reset here, because the training loop only wakes up later.
        self.is_waiting = False
        self._request_event.set()

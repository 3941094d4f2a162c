"""The interfaces of a run's processes, as the driver uses them.

    Workers   play groups and send them directly to the buffer
    Buffer    stores groups and makes batches of them
    Learners  train on a batch, which they fetch from the buffer

This package implements them with Ray. Tests of the controller simulate them on one event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.runs import Transcript
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.types import (
    Coefficients,
    GroupSpec,
    RolloutGroup,
    SampledCompletion,
    Sampling,
    SavedFile,
    ScoringRequest,
)
from ludus.trainer.data.buffer import BatchHandle, BufferState, Refusal, TakenBatch
from ludus.trainer.data.counts import RolloutCounts

if TYPE_CHECKING:  # the buffer's process starts faster without transformers
    from ludus.trainer.learner.abandonment import AbandonedStep
    from ludus.trainer.learner.step_metrics import StepMetrics
    from ludus.trainer.weights.canary import WorkerWeights


class Slot(Protocol):
    """Reserved capacity of a worker for some groups; `play` or `release` frees it."""

    max_groups: int
    """Maximum number of groups that may be played in the slot, at least 1."""

    @property
    def worker_number(self) -> int:
        """Number of the worker."""

    async def play(self, specs: Sequence[GroupSpec]) -> list[Refusal]:
        """Play groups, send them to the buffer, and return the groups that must be replaced.

        Capacity of the slot beyond these groups is released at once.
        """

    def release(self) -> None:
        """Free the capacity without playing anything."""


class Learners(Protocol):
    """All ranks of the learner."""

    @property
    def reduced_max_tokens(self) -> int | None:
        """Limit of tokens per micro-batch since a rank ran out of memory; None if none did."""

    async def train_step(
        self,
        batch: BatchHandle,
        coefficients: Coefficients,
        *,
        keeps_restore_point: bool = False,
        wait_for_fetches: Callable[[], Awaitable[None]] | None = None,
    ) -> StepMetrics | AbandonedStep:
        """Train on a batch from the buffer and return the metrics of the step.

        If a rank runs out of memory, all ranks train the batch again in smaller micro-batches.

        Args:
            keeps_restore_point: whether the whole step can be abandoned, at the cost of main
                memory.
            wait_for_fetches: function that waits until all workers have fetched the published
                weights. It is called before ranks are replaced, because the weights may be lost
                with the old ranks.
        """

    async def abandon_step(self, *, discards_state: bool) -> None:
        """Request to abandon the current step; `train_step` returns whether it was.

        Args:
            discards_state: whether to abandon the step even if its state cannot be restored.
        """

    async def publish(self, version: int, canary: Sequence[ScoringRequest]) -> PublishedWeights:
        """Publish the weights as `version`, so that workers can fetch them."""

    async def score_completions(self, requests: Sequence[ScoringRequest]) -> list[list[float]]:
        """Return the log-probs of each completion's tokens under the policy."""

    async def ping(self) -> None:
        """Return when every rank has responded."""

    async def save(self, state_folder: Path, model_folder: Path) -> Sequence[SavedFile]:
        """Write the learner's state and the Hugging Face model; return the written files."""

    async def restart(self, learner_folder: Path | None) -> None:
        """Replace all ranks; they continue from a checkpoint or from the first model."""


class Workers(Protocol):
    """The rollout workers, whose number may change."""

    @property
    def weights_by_worker(self) -> Mapping[int, WorkerWeights]:
        """Weights of each ready worker, by its number."""

    @property
    def num_breaches(self) -> int:
        """Number of canary checks that failed: workers scored with different weights."""

    def describe(self) -> str:
        """Describe the number of ready workers, and the activity of each worker."""

    def resize(self, num_workers: int) -> None:
        """Set the number of workers."""

    async def acquire_slot(self) -> Slot:
        """Wait for a free slot on a ready worker and return it."""

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        """Play one episode per seed and return the outcomes in the order of the seeds."""

    async def play_samples(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[Transcript]:
        """Play one evaluation episode per seed and return the transcripts; none if it fails."""

    async def complete(
        self, prompt_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> list[SampledCompletion]:
        """Return one completion of the prompt per seed."""

    async def load_weights(
        self, published_weights: PublishedWeights, timeout_s: float
    ) -> Sequence[WorkerWeights]:
        """Load published weights on the ready workers and return their weights."""


class Buffer(Protocol):
    """The replay buffer (`data/buffer.py`).

    `take`, `put_back`, `copy_state` and `restore` raise BufferLostError if the buffer died.
    """

    async def begin(
        self, indices: Iterable[int], version: int, final_indices: Container[int] = ()
    ) -> None:
        """See GroupBuffer.begin."""

    async def take(self, version: int, timeout_s: float) -> TakenBatch:
        """Return batch `version`, or no groups if it is not complete within `timeout_s`."""

    async def put_back(self, counts: Mapping[str, RolloutCounts]) -> None:
        """See GroupBuffer.put_back."""

    async def copy_state(self) -> BufferState:
        """See GroupBuffer.copy_state."""

    async def restore(
        self, groups: Iterable[RolloutGroup], counts: Mapping[str, RolloutCounts], version: int
    ) -> int:
        """See GroupBuffer.restore."""

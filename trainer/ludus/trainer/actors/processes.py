"""The processes of a run, as the driver sees them.

    Workers   play groups, which go to the buffer without passing through the driver
    Buffer    holds them, and makes the batches
    Learners  train on a batch, which they get from the buffer

Ray's are in `actors`; the tests of the controller have simulated ones, on one event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ludus.env.evaluation import EpisodeOutcome
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.types import (
    Coefficients,
    Completion,
    GroupSpec,
    RolloutGroup,
    Sampling,
    SavedFile,
    ScoringRequest,
)
from ludus.trainer.data.buffer import BufferState, Refusal, TakenBatch
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.learner.learner import StepMetrics
from ludus.trainer.weights import WorkerWeights


@dataclass(frozen=True, slots=True)
class Slot:
    """The right to have some groups played, which travel together; `play` gives it back."""

    worker: Any
    """Means something to the workers only."""
    size: int
    """Groups that may be played in it, at least one."""


class Learners(Protocol):
    """All ranks of the learner, together."""

    async def train_step(self, batch: Any, coefficients: Coefficients) -> StepMetrics:
        """What the step did; `batch` is what the buffer gave."""

    async def publish(self, version: int, canary: Sequence[ScoringRequest]) -> PublishedWeights:
        """The version, fetchable."""

    async def score_completions(self, prompts: Sequence[ScoringRequest]) -> list[list[float]]:
        """The log-probs of each prompt's completion under the policy."""

    async def ping(self) -> None:
        """Return when every rank has responded."""

    async def save(self, state_folder: Path, model_folder: Path) -> Sequence[SavedFile]:
        """Write the learner's state, and the model as a Hugging Face folder: what was written."""

    async def restart(self, learner_folder: Path | None) -> None:
        """Replace all ranks; they continue from a checkpoint or from the first model."""


class Workers(Protocol):
    """The rollout workers, which come and go."""

    @property
    def held_weights(self) -> Mapping[int, WorkerWeights]:
        """What each ready worker samples from, by its number."""

    @property
    def num_breaches(self) -> int:
        """Canary prompts that a worker answered from other weights, all in all."""

    def describe(self) -> str:
        """How many workers are ready, and what each does."""

    def resize(self, num_workers: int) -> None:
        """Want so many workers from now on."""

    async def slot(self) -> Slot:
        """A slot on a ready worker, once there is one."""

    def free(self, slot: Slot) -> None:
        """Give a slot back in which nothing was played."""

    async def play(self, slot: Slot, groups: Sequence[GroupSpec]) -> list[Refusal]:
        """The groups that must be replaced; the others are in the buffer.

        What the slot has room for beyond these groups is given back at once.
        """

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        """The outcome of one game per seed, in the order of the seeds."""

    async def complete(
        self, prompt_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """What the policy says after the prompt, once per seed."""

    async def load_weights(
        self, published: PublishedWeights, timeout_s: float
    ) -> Sequence[WorkerWeights]:
        """What the ready workers hold now: the published weights."""


class Buffer(Protocol):
    """The replay buffer (`data/buffer.py`).

    `take`, `state` and `restore` raise BufferLostError once it has died.
    """

    async def begin(self, indices: Iterable[int], version: int) -> None:
        """See GroupBuffer.begin."""

    async def take(self, version: int, timeout_s: float) -> TakenBatch:
        """Batch `version`; without groups when it is not there within `timeout_s`."""

    async def state(self) -> BufferState:
        """See GroupBuffer.state."""

    async def restore(
        self, groups: Iterable[RolloutGroup], counts: Mapping[str, RolloutCounts], version: int
    ) -> int:
        """See GroupBuffer.restore."""

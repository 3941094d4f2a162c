"""The training loop of a run that fine-tunes a language model on conversations.

    conversations --step by step--> Batch --> learner (cross-entropy of the responses) --> metrics
                                                  |
        held-out conversations --> validation loss, every few steps --> early stopping
                                                  |
                                                  +--> checkpoints, and the model's folder

The learner, its ranks and its checkpoints are those of language-model runs. A batch depends only on
the seed and the step, so a resumed run is identical to an uninterrupted run.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ludus.proto.config import SftRun
from ludus.proto.evaluation_history import EvaluationHistory
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import Phase
from ludus.trainer.core.output import replace_folder
from ludus.trainer.core.stopping import StopRequest, check_skipped_updates
from ludus.trainer.core.tasks import wait_for_first
from ludus.trainer.core.types import Batch, Coefficients, SavedFile
from ludus.trainer.driver.loops.step_values import StepTimes, compute_learner_values
from ludus.trainer.learner.abandonment import AbandonedStep
from ludus.trainer.learner.step_metrics import StepMetrics
from ludus.trainer.run.checkpoint import LEARNER_FOLDER, MODEL_FOLDER, SavedState
from ludus.trainer.run.lifecycle import RunStorage
from ludus.trainer.run.metrics_writer import MetricsWriter
from ludus.trainer.run.schedule import CheckpointSchedule, compute_coefficients
from ludus.trainer.sft.conversations import BatchOrder, ConversationSet

_log = logging.getLogger(__name__)

_CONVERSATIONS_PER_CALL = 64
"""Number of conversations that one call of the learner validates; a stop waits for one call."""


class SftState(SavedState):
    """State of a fine-tuning run between two training steps."""

    fingerprint: str = ""
    """Fingerprint of the conversations."""
    num_tokens_trained: int = 0
    num_skipped_updates: int = 0
    start_loss: float | None = None
    """Validation loss before training; None until it is measured."""
    validation_loss: float | None = None
    """Latest validation loss."""
    best_loss: float | None = None
    """Lowest validation loss of the trained model."""
    best_step: int = 0
    """Step of the lowest validation loss."""
    num_validations_without_gain: int = 0
    """Number of validations since the lowest loss."""


@dataclass(frozen=True, slots=True)
class SftConversations:
    """The conversations of a run."""

    train_set: ConversationSet
    train_indices: Sequence[int]
    """Conversations of `train_set` that the model learns from."""
    validation_set: ConversationSet
    """The set with the held-out conversations, which may be `train_set`."""
    validation_indices: Sequence[int]
    """Held-out conversations of `validation_set`; empty without validation."""

    def compute_fingerprint(self) -> str:
        """Return a hash of the training conversations."""
        return self.train_set.compute_fingerprint()


class SftLearners(Protocol):
    """All ranks of the learner, as far as fine-tuning uses them."""

    async def train_step(
        self, batch: Batch, coefficients: Coefficients
    ) -> StepMetrics | AbandonedStep:
        """Train on a batch and return the metrics of the step."""

    async def abandon_step(self, *, discards_state: bool) -> None:
        """Request to abandon the current step."""

    async def compute_mean_loss(self, batch: Batch) -> float:
        """Return the mean negative log-prob of the batch's trained tokens, without an update."""

    async def save(self, state_folder: Path, model_folder: Path) -> Sequence[SavedFile]:
        """Write the learner's state and the Hugging Face model; return the written files."""

    async def export_model(self, folder: Path) -> None:
        """Write the Hugging Face model."""


class SftLoop:
    """Trains a run until its last step, an early stop, or a stop request.

    Args:
        storage: open folder of the run, whose state is updated in place.
    """

    def __init__(
        self,
        run: SftRun,
        data: SftConversations,
        learners: SftLearners,
        storage: RunStorage[SftState],
        metrics: MetricsWriter,
        stop_request: StopRequest,
    ) -> None:
        self._run, self._data, self._learners = run, data, learners
        self._learner_run = run.make_learner_run()
        self._storage, self._state, self._metrics = storage, storage.state, metrics
        self._stop_request = stop_request
        training = run.training
        self._order = BatchOrder(data.train_indices, training.batch_size, run.seed)
        self._schedule = CheckpointSchedule(
            training.checkpoint_every_steps, training.checkpoint_every_s
        )
        self._saved_step = self._state.step
        self.is_step_abandoned = False
        """True if the run stopped in the middle of a step."""

    @property
    def has_stopped_early(self) -> bool:
        """True if the validation loss has not improved for too long."""
        patience, state = self._run.validation.patience, self._state
        return patience is not None and state.num_validations_without_gain >= patience

    @property
    def is_finished(self) -> bool:
        """True if there is nothing left to train."""
        state = self._state
        if state.is_evaluation_due:
            return False
        return state.step >= self._run.training.num_steps or self.has_stopped_early

    @property
    def model_folder(self) -> Path:
        """The folder of the fine-tuned model."""
        return self._storage.folder.path / MODEL_FOLDER

    async def run(self) -> None:
        """Train, and write the model's folder if the run is finished.

        Raises:
            LearnerLostError: a rank of the learner died.
            TrainingStalledError: all updates are skipped.
            Exception: a step failed. A note says from which checkpoint the run can continue.
        """
        try:
            await self._train()
            if self.is_finished and (not self._keeps_best or self._state.best_loss is None):
                await self._export_model()
        except Exception as error:
            error.add_note(await self._save_after_failure())
            raise
        finally:
            self._metrics.clock.stop()

    async def _train(self) -> None:
        state, request = self._state, self._stop_request
        self._metrics.log_phase(Phase.TRAIN, state.step)
        self._metrics.clock.start()
        if state.step == 0 and state.start_loss is None:
            state.is_evaluation_due = True
        await self._validate_if_due()
        while not (self.is_finished or request.is_set):
            if not await self._train_step():
                break
            await self._validate_if_due()
            self._schedule.end_step()
            if self._is_checkpoint_due:
                await self._save_checkpoint()
        await self._save_checkpoint()

    async def _train_step(self) -> bool:
        """Take one training step; return False if the step was abandoned."""
        state, start_s = self._state, time.monotonic()
        batch = self._data.train_set.make_batch(self._order.choose(state.step))
        coefficients = compute_coefficients(self._learner_run, state.step)
        task = asyncio.create_task(self._learners.train_step(batch, coefficients))
        if not await wait_for_first(task, self._stop_request.wait_until_overdue()):
            # A step has one update, so its start can always be restored.
            await self._learners.abandon_step(discards_state=False)
        outcome = await task
        if isinstance(outcome, AbandonedStep):
            self.is_step_abandoned = True
            return False
        state.step += 1
        state.num_tokens_trained += outcome.num_tokens_trained
        state.num_skipped_updates += outcome.num_skipped_updates
        self._record_step(outcome, time.monotonic() - start_s)
        is_last = state.step >= self._run.training.num_steps
        state.is_evaluation_due = is_last or state.step % self._run.validation.every_steps == 0
        check_skipped_updates(
            outcome.num_skipped_in_a_row,
            "lower learner.learning_rate, or set learner.dtype = 'float32'",
        )
        return True

    def _record_step(self, metrics: StepMetrics, duration_s: float) -> None:
        batch_size = self._run.training.batch_size
        values = compute_learner_values(metrics, StepTimes(wait_s=0.0, train_s=duration_s))
        if duration_s > 0:
            values[TrainMetric.TOKENS_PER_SECOND] = metrics.num_tokens_in_batch / duration_s
        self._metrics.log_step(self._state.step, self._state.step * batch_size, values, {})

    async def _validate_if_due(self) -> None:
        """Validate the model; a resumed run makes up for a validation that a stop prevented."""
        state = self._state
        if not self._data.validation_indices:
            state.is_evaluation_due = False
        if not state.is_evaluation_due or self._stop_request.is_set:
            return
        self._metrics.clock.stop()
        self._metrics.log_phase(Phase.EVALUATE, state.step)
        loss = await self._compute_validation_loss()
        if loss is None:
            return
        self._metrics.log_event(
            state.step,
            {TrainMetric.VALIDATION_LOSS: loss} if math.isfinite(loss) else {},
            num_games_trained=state.step * self._run.training.batch_size,
        )
        state.is_evaluation_due, state.validation_loss = False, loss
        if state.step == 0:
            state.start_loss = loss
        elif self._is_better(loss):
            state.best_loss, state.best_step = loss, state.step
            state.num_validations_without_gain = 0
            if self._keeps_best:
                await self._export_model()
        else:
            state.num_validations_without_gain += 1
        self._metrics.log_phase(Phase.TRAIN, state.step)
        self._metrics.clock.start()

    def _is_better(self, loss: float) -> bool:
        best_loss = self._state.best_loss
        if best_loss is None:
            return math.isfinite(loss)
        return loss < best_loss - self._run.validation.min_improvement

    async def _compute_validation_loss(self) -> float | None:
        """Return the mean loss per token, or None if a stop is overdue."""
        indices, loss_sum, num_tokens = self._data.validation_indices, 0.0, 0
        for start in range(0, len(indices), _CONVERSATIONS_PER_CALL):
            if self._stop_request.is_overdue:
                return None
            batch = self._data.validation_set.make_batch(
                indices[start : start + _CONVERSATIONS_PER_CALL]
            )
            num_batch_tokens = int(batch.num_sampled_tokens[batch.sequence_of_sample].sum())
            loss_sum += await self._learners.compute_mean_loss(batch) * num_batch_tokens
            num_tokens += num_batch_tokens
        return loss_sum / num_tokens

    @property
    def _is_checkpoint_due(self) -> bool:
        """True if a checkpoint must follow this step; also if its model is the best so far."""
        step = self._state.step
        return self._schedule.is_due(step) or self._storage.checkpoints.is_best(
            step, self._evaluations
        )

    @property
    def _evaluations(self) -> EvaluationHistory:
        """Results that decide which checkpoint is kept; none if the best model is kept anyway."""
        return EvaluationHistory() if self._keeps_best else self._metrics.evaluations

    @property
    def _keeps_best(self) -> bool:
        return self._run.validation.keep == "best" and bool(self._data.validation_indices)

    async def _export_model(self) -> None:
        with replace_folder(self.model_folder) as folder:
            await self._learners.export_model(folder)

    async def _save_checkpoint(self) -> None:
        """Write a checkpoint of the current step, unless there is one."""
        state, start_s = self._state, time.monotonic()
        if state.step == self._saved_step:
            return
        self._metrics.log_phase(Phase.SAVE_CHECKPOINT, state.step)
        with self._storage.checkpoints.prepare(state.step) as folder:
            files = await self._learners.save(folder / LEARNER_FOLDER, folder / MODEL_FOLDER)
            await self._storage.checkpoints.commit(folder, state, files, self._evaluations)
        self._saved_step = state.step
        duration_s = time.monotonic() - start_s
        self._schedule.end_checkpoint(duration_s)
        self._metrics.log_checkpoint(state.step, duration_s)
        self._metrics.log_phase(Phase.TRAIN, state.step)

    async def _save_after_failure(self) -> str:
        """Save the last complete step if the learner is alive; return a note on how to continue."""
        with suppress(Exception):  # the run must raise its first error
            await self._save_checkpoint()
        if not self._storage.checkpoints.list_newest_first():
            return "there is no checkpoint to continue from"
        return f"continue with --resume from step {self._saved_step}"

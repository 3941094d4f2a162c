"""Files of a reward model's training.

<output>/            Hugging Face folder: a sequence classifier with one label, and its tokenizer
    metrics.json     RewardModelMetrics
<output>.training/   the run's folder, during training only
    config.json      the run configuration
    progress.jsonl   one RewardModelProgress per line
    trainer.log      log of the training
    checkpoints/     step-<n>/
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

METRICS_FILE = "metrics.json"
PROGRESS_FILE = "progress.jsonl"
TRAINING_SUFFIX = ".training"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PreferenceScores(_Record):
    """Results of a reward model on comparisons."""

    accuracy: float
    """Share of the comparisons in which the preferred answer has the highest score; a tie counts
    as wrong."""
    mrr: float
    """Mean reciprocal rank of the preferred answer; a tie counts as the worse rank."""
    loss: float
    """Mean of -log softmax of the scores at the preferred answer; the Bradley-Terry loss for two
    answers."""
    score_mean: float
    score_std: float


class RewardModelEpoch(_Record):
    """One pass over the comparisons."""

    epoch: int
    """Number of the epoch, from 1."""
    train_loss: float
    """Mean of the losses during the pass."""
    train_accuracy: float
    test: PreferenceScores | None
    """Results on the held-out comparisons; null if there are none."""
    elapsed_s: float
    """Training time so far, without the time between a stop and a resume."""


class RewardModelProgress(_Record):
    """A line of progress.jsonl."""

    phase: Literal["read", "train", "judge", "save"]
    step: int
    """Number of optimizer steps so far."""
    num_steps: int
    """Total number of optimizer steps; 0 while the data are read."""
    epoch: int
    """Number of the current epoch, from 1."""
    num_epochs: int
    loss: float | None
    """Loss of the latest step."""
    elapsed_s: float
    finished: RewardModelEpoch | None = None
    """The epoch that just ended."""


class RewardModelMetrics(_Record):
    """Contents of metrics.json."""

    model: str
    """Initial model."""
    data: str
    num_train: int
    """Number of training comparisons."""
    num_test: int
    """Number of held-out comparisons."""
    num_answers: int
    """Number of answers per comparison. A random guess is right with probability
    1 / num_answers."""
    num_left_out: int
    """Number of comparisons that were skipped because all their answers are equal."""
    num_texts_cut: int
    """Number of texts that were longer than max_tokens."""
    num_steps: int
    num_steps_skipped: int
    """Number of updates that were skipped because their gradient was not finite."""
    kept_epoch: int
    """Number of the epoch whose weights are in the folder."""
    accuracy: float | None
    """Accuracy of the weights in the folder on the held-out comparisons; null if there are none."""
    mrr: float | None
    loss: float | None
    epochs: tuple[RewardModelEpoch, ...]
    elapsed_s: float

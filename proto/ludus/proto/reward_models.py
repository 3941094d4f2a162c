"""What the training of a reward model leaves behind, and what it tells on the way.

<output>/            a Hugging Face folder: a sequence classifier of one label, its tokenizer
    metrics.json     RewardModelMetrics
<output>.training/   while it is trained
    progress.jsonl   RewardModelProgress, one a line
    checkpoint.pt    what a resume continues from
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

METRICS_FILE = "metrics.json"
PROGRESS_FILE = "progress.jsonl"
CHECKPOINT_FILE = "checkpoint.pt"
TRAINING_SUFFIX = ".training"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Judgement(_Record):
    """How a reward model does on comparisons."""

    accuracy: float
    """Share of the comparisons in which it prefers what people prefer; a tie is wrong."""
    mrr: float
    """Mean of 1 / the rank that it gives to what people prefer; a tie counts as worse."""
    loss: float
    """Mean of -log softmax of the scores at the preferred answer: Bradley-Terry's for two."""
    score_mean: float
    """Of all scores."""
    score_std: float


class RewardModelEpoch(_Record):
    """One pass over the comparisons."""

    epoch: int
    """From 1."""
    train_loss: float
    """Mean over the pass, while the weights moved."""
    train_accuracy: float
    test: Judgement | None
    """On the comparisons held out; null where there are none."""
    elapsed_s: float
    """Since training began, without what lay between a stop and a resume."""


class RewardModelProgress(_Record):
    """A line of progress.jsonl."""

    phase: Literal["read", "train", "judge", "save"]
    step: int
    """Optimizer steps done."""
    num_steps: int
    """Of the whole training; 0 while the data are read."""
    epoch: int
    """The pass under way, from 1."""
    num_epochs: int
    loss: float | None
    """Of the newest steps."""
    elapsed_s: float
    finished: RewardModelEpoch | None = None
    """The epoch that has just ended."""


class RewardModelMetrics(_Record):
    """metrics.json."""

    model: str
    """What it began as."""
    data: str
    num_train: int
    """Comparisons."""
    num_test: int
    """Comparisons held out."""
    num_answers: int
    """In a comparison: a guess is right once in so many."""
    num_left_out: int
    """Comparisons whose answers are all equal."""
    num_texts_cut: int
    """Texts that were longer than max_tokens."""
    num_steps: int
    num_steps_skipped: int
    """Whose gradient was not finite."""
    kept_epoch: int
    """The one whose weights the folder has."""
    accuracy: float | None
    """Of those weights, on the comparisons held out; null where there are none."""
    mrr: float | None
    loss: float | None
    epochs: tuple[RewardModelEpoch, ...]
    elapsed_s: float

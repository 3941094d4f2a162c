"""Runs of `ludus train-reward`, which train a reward model from preferences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ludus.proto.config.section import (
    LearningRate,
    LogLevel,
    NonNegativeInt,
    NumThreads,
    PositiveFloat,
    PositiveInt,
    Section,
)
from ludus.proto.paths import PathText
from ludus.proto.reward_models import TRAINING_SUFFIX

MAX_DEFAULT_WARMUP_STEPS = 500
"""Upper limit of the default number of warm-up steps."""


class RewardModelRun(Section):
    """A run that trains a reward model: initial model, data and optimizer."""

    kind: Literal["reward_model"] = "reward_model"
    """Kind of the run."""
    model: PathText
    """Hugging Face id or folder of a causal language model, or of a reward model to train
    further."""
    data: Path
    """Comparisons: a .jsonl, .json, .csv or .parquet file, a folder of such files, or a folder
    saved by `datasets`. Columns: prompt, chosen, rejected; or query, sample0, sample1, ...,
    best."""
    output: Path = Path("reward_model")
    """Folder of the trained reward model."""
    format: Literal["auto", "chat", "text"] = "auto"
    """Way to join a prompt and its completion: "chat" uses the tokenizer's chat template, "text"
    puts one after the other. "auto" uses the chat template if the tokenizer has one."""
    test_size: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the comparisons that is held out. Comparisons with the same prompt stay
    together."""
    epochs: PositiveInt = 3
    """Number of passes over the comparisons."""
    batch_size: PositiveInt = 32
    """Number of comparisons per optimizer step."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate of AdamW, which then decays linearly to 0."""
    warmup_steps: NonNegativeInt | None = None
    """Number of optimizer steps over which the learning rate rises. null takes a tenth of all
    steps, at most 500."""
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum norm of the gradients; larger gradients are scaled down."""
    freeze_backbone: bool = False
    """Train only the head."""
    keep: Literal["last", "best"] = "last"
    """Weights in the output: those of the last epoch, or those with the smallest held-out
    loss."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of a text; longer texts lose their beginning. null takes the limit
    of the model."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Maximum number of padded tokens in a micro-batch. The loss does not depend on it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation. Parameters and optimizer state are always float32."""
    device: str | None = None
    """Device: "cpu", "cuda" or "cuda:1". null takes a GPU if there is one."""
    num_threads: NumThreads = 1
    """Number of CPU threads."""
    seed: NonNegativeInt = 42
    """Seed of the head's initial weights, the split, the order and the dropout."""
    log_level: LogLevel = "info"
    """Lowest severity of the messages in trainer.log."""

    @property
    def folder(self) -> Path:
        """Absolute path of the run's folder, which exists during training only."""
        return self.output.absolute().with_name(self.output.name + TRAINING_SUFFIX)

"""How a reward model is trained from preferences: `ludus train-reward`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ludus.proto.config.section import (
    LearningRate,
    NonNegativeInt,
    NumThreads,
    PositiveFloat,
    PositiveInt,
    Section,
)

MOST_WARMUP_STEPS = 500
"""Where nothing is said."""


class RewardModelConfig(Section):
    """A reward model: what it begins as, what it learns from, and how."""

    model: str
    """Hugging Face id or folder of a causal language model, or of a reward model to train on."""
    data: Path
    """Comparisons: a .jsonl, .json, .csv or .parquet file, a folder of such files, or one that
    `datasets` saved. Columns prompt, chosen, rejected; or query, sample0, sample1, ..., best."""
    output: Path = Path("reward_model")
    """Folder that the reward model is written to."""
    format: Literal["auto", "chat", "text"] = "auto"
    """How prompt and answer become one text: by the tokenizer's chat template, or one after the
    other; "auto" takes the template where there is one."""
    test_size: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the comparisons that is held out; those of one prompt stay together."""
    epochs: PositiveInt = 3
    """Passes over the comparisons."""
    batch_size: PositiveInt = 32
    """Comparisons per optimizer step."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate of AdamW, which then falls evenly to 0."""
    warmup_steps: NonNegativeInt | None = None
    """Optimizer steps over which the learning rate rises; null takes a tenth of all, at most
    500."""
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    freeze_backbone: bool = False
    """Trains the head alone."""
    keep: Literal["last", "best"] = "last"
    """Which epoch's weights are kept: the last one's, or those of the smallest held-out loss."""
    max_tokens: PositiveInt | None = None
    """Tokens of a text; of a longer one the beginning is cut off. Null is what the model takes."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Padded tokens that go through the model at once; the loss does not depend on it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; parameters and optimizer stay float32."""
    device: str | None = None
    """One of "cpu", "cuda", "cuda:1" or "cuda:1"; null takes a GPU where there is one."""
    num_threads: NumThreads = 1
    """CPU threads."""
    seed: NonNegativeInt = 42
    """Fixes the head's initial weights, the split, the order and dropout."""

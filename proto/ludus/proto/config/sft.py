"""Runs of `ludus sft`, which fine-tune a language model on conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ludus.proto.config.algorithm import CispoLoss, GrpoConfig, NoCorrection
from ludus.proto.config.environment import EnvironmentConfig
from ludus.proto.config.language_model import LanguageModelRun, TrainingConfig, check_weight_decay
from ludus.proto.config.section import (
    LearningRate,
    NonNegativeFloat,
    NumThreads,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)
from ludus.proto.config.sections import (
    LearnerConfig,
    PlacementConfig,
    PretrainedModel,
    RolloutConfig,
)
from ludus.proto.config.training_run import TrainingLength, TrainingRun
from ludus.proto.paths import PathText

_FULL_LEARNING_RATE = 2e-5
_LORA_LEARNING_RATE = 2e-4
_SUPERVISED_LOSS = GrpoConfig(
    loss=CispoLoss(), correction=NoCorrection(), geometric_mask=None, zero_variance_groups="keep"
)
"""The policy loss that is cross-entropy: with one update per batch, the ratio of CISPO is 1, and
with advantages of 1, its loss is the mean negative log-prob of the trained tokens."""


class SftData(Section):
    """The conversations that the model learns from."""

    path: PathText
    """Conversations: a .jsonl, .json, .csv or .parquet file, a folder of such files, a folder saved
    by `datasets`, or the Hugging Face id of a data set. Columns: messages, and optionally tools; or
    prompt and completion (docs/sft.md)."""
    split: str = "train"
    """Split of a data set that has several."""
    max_tokens: Annotated[int, Field(ge=2)] = 2048
    """Maximum number of tokens of a conversation."""
    overlong: Literal["refuse", "drop", "truncate"] = "refuse"
    """Treatment of longer conversations: an error before the run starts; left out and counted; or
    cut off at the end and counted."""


class ValidationConfig(Section):
    """Validation on held-out conversations, and early stopping."""

    size: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the conversations that is held out. 0 turns validation off, unless path is set."""
    path: PathText | None = None
    """Separate conversations for validation, in the same formats as data.path. null holds out a
    share of the conversations."""
    split: str = "test"
    """Split of path, if it is a data set that has several."""
    every_steps: PositiveInt = 20
    """Number of training steps between validations. One is made before the first step, too, and one
    after the last."""
    patience: PositiveInt | None = None
    """Number of validations in a row without a lower loss after which training stops. null trains
    to the last step."""
    min_improvement: NonNegativeFloat = 0.0
    """Amount by which a loss must be lower than the lowest one so far to count as lower."""
    keep: Literal["best", "last"] = "best"
    """Weights in the model's folder: those with the lowest validation loss, or those of the last
    step. Without validation, they are always those of the last step."""

    @property
    def is_enabled(self) -> bool:
        """True if the run holds out conversations."""
        return self.size > 0 or self.path is not None


class SftTraining(TrainingLength):
    """Length of the training, and its checkpoints."""

    num_epochs: PositiveFloat | None = 3.0
    """Number of passes over the conversations, from which num_steps is computed. The last step is
    filled up with conversations of the next pass. null takes num_steps, and so does a section that
    sets num_steps only."""
    batch_size: PositiveInt = 32
    """Number of conversations per optimizer step."""
    learner_timeout_s: Seconds = 3600.0
    """Time limit in seconds of one call of the learner, such as a training step, a validation or a
    checkpoint."""

    @model_validator(mode="before")
    @classmethod
    def _prefer_num_steps(cls, tree: Any) -> Any:
        """Read a section with num_steps alone as one without num_epochs."""
        if isinstance(tree, dict) and "num_steps" in tree:
            return {"num_epochs": None, **tree}
        return tree


class SftLearner(LearnerConfig):
    """Updates of the model."""

    num_threads: NumThreads | None = None
    """Number of CPU threads of each rank. null takes 1 for models of a width below 256, on a GPU
    and in a Ray cluster; otherwise an equal share of this machine's cores, or of
    OMP_NUM_THREADS."""
    learning_rate: LearningRate | None = None
    """Peak learning rate of AdamW. null takes 2e-5, or 2e-4 with LoRA."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Course of the learning rate after the warm-up. "linear" and "cosine" decay to
    learning_rate_final."""
    num_minibatches: Literal[1] = 1
    """Number of optimizer updates per batch, which is always 1."""
    update_epochs: Literal[1] = 1
    """Number of passes over a batch, which is always 1; training.num_epochs has the passes over the
    conversations."""
    offload_reference: bool = False
    """Has no effect, because a fine-tuning run has no reference model."""
    collective_timeout_s: Seconds = 600.0
    """Time in seconds that a rank waits for the other ranks before the run ends. It can be resumed
    from its latest checkpoint."""


class SftRun(TrainingRun):
    """A run that fine-tunes a language model on conversations."""

    kind: Literal["sft"] = "sft"
    """Kind of the run."""
    model: PretrainedModel
    """The model to fine-tune."""
    data: SftData
    validation: ValidationConfig = ValidationConfig()
    learner: SftLearner = SftLearner()
    training: SftTraining = SftTraining()
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        check_weight_decay(self.learning_rate, self.learner.weight_decay)
        if self.validation.patience is not None and not self.validation.is_enabled:
            raise ValueError(
                f"validation.patience = {self.validation.patience} needs held-out conversations, "
                "but validation.size = 0 and validation.path is null; set one of them"
            )
        return self

    @property
    def learning_rate(self) -> float:
        """The peak learning rate."""
        if self.learner.learning_rate is not None:
            return self.learner.learning_rate
        return _FULL_LEARNING_RATE if self.model.lora is None else _LORA_LEARNING_RATE

    @property
    def environments(self) -> Mapping[str, EnvironmentConfig]:
        """The environments of the run, which has none."""
        return {}

    def make_learner_run(self) -> LanguageModelRun:
        """Return the language-model run with the learner of this run.

        Its environments, generator and rollout are never used.
        """
        training = self.training
        return LanguageModelRun(
            name=self.name,
            output_dir=self.output_dir,
            seed=self.seed,
            model=self.model,
            learner=self.learner.model_copy(update={"learning_rate": self.learning_rate}),
            algorithm=_SUPERVISED_LOSS,
            rollout=RolloutConfig(max_tokens=self.data.max_tokens, max_completion_tokens=1),
            training=TrainingConfig(
                num_steps=training.num_steps,
                learner_timeout_s=training.learner_timeout_s,
            ),
            placement=self.placement,
        )

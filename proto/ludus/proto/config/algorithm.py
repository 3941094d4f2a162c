"""Algorithms: advantages, losses and critics. `ludus.trainer.algorithms` has the formulas."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ludus.proto.config.section import (
    ImportPath,
    LearningRate,
    NonNegativeFloat,
    PositiveFloat,
    Section,
    assume_kind,
)
from ludus.proto.paths import PathText

LowerClipRange = Annotated[float, Field(gt=0, le=1)]
"""Distance below 1 at which a ratio is clipped; 1 never clips it."""

WeightCap = Annotated[float, Field(ge=1)]
"""Largest importance weight. A cap below 1 would scale down samples of the learner's own policy."""


class ClipLoss(Section):
    """PPO's clipped ratio per token, with clip-higher and dual clip."""

    kind: Literal["clip"] = "clip"
    clip_low: LowerClipRange = 0.2
    """Lower clipping range: the ratio is clipped to 1 - clip_low if the advantage is negative."""
    clip_high: PositiveFloat = 0.28
    """Upper clipping range: the ratio is clipped to 1 + clip_high if the advantage is positive."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Upper bound of the loss of a negative advantage A, as a multiple of |A|. null sets no
    bound."""


class GspoLoss(Section):
    """One clipped ratio per sequence: the geometric mean of the token ratios."""

    kind: Literal["gspo"] = "gspo"
    clip_low: LowerClipRange = 3e-4
    """Lower clipping range: the sequence ratio is clipped to 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """Upper clipping range: the sequence ratio is clipped to 1 + clip_high."""


class CispoLoss(Section):
    """The log-prob, weighted by a clipped ratio that has no gradient.

    Clipped tokens keep a gradient.
    """

    kind: Literal["cispo"] = "cispo"
    clip_low: LowerClipRange = 1.0
    """Lower clipping range: the ratio is clipped to 1 - clip_low. 1 does not clip it."""
    clip_high: PositiveFloat = 4.0
    """Upper clipping range: the ratio is clipped to 1 + clip_high."""


class FunctionLoss(Section):
    """A user-defined loss function."""

    kind: Literal["function"] = "function"
    function: ImportPath
    """Function of logprobs, old_logprobs, advantages and mask, [N, T] each, that returns the loss
    of every token, [N, T] (docs/algorithms.md)."""


class TokenTis(Section):
    """Truncated importance weight per token, for the difference between sampler and learner."""

    kind: Literal["token_tis"] = "token_tis"
    cap: WeightCap = 2.0
    """Largest importance weight."""


class SequenceTis(Section):
    """Truncated importance weight per sequence."""

    kind: Literal["sequence_tis"] = "sequence_tis"
    cap: WeightCap = 5.0
    """Largest importance weight."""


class SequenceMask(Section):
    """Importance weight per sequence. Sequences above the cap are masked."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    cap: WeightCap = 3.0
    """Largest importance weight; sequences above it are masked."""


class IcePop(Section):
    """Importance weight per token. Tokens outside a range are masked."""

    kind: Literal["icepop"] = "icepop"
    low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Smallest ratio of learner to sampler."""
    high: Annotated[float, Field(gt=1)] = 5.0
    """Largest ratio of learner to sampler."""


class NoCorrection(Section):
    """No correction for the difference between sampler and learner."""

    kind: Literal["off"] = "off"


PolicyLoss = Annotated[
    ClipLoss | GspoLoss | CispoLoss | FunctionLoss,
    Field(discriminator="kind"),
    assume_kind("clip"),
]
Correction = Annotated[
    TokenTis | SequenceTis | SequenceMask | IcePop | NoCorrection,
    Field(discriminator="kind"),
    assume_kind("token_tis"),
]


class EntropyControl(Section):
    """Control of the entropy bonus, which acts only while the entropy is at or below a target."""

    target: PositiveFloat
    """Mean entropy per sampled token, in nats. Choose a value near the entropy of the first
    steps, below which the policy should not fall."""
    change: PositiveFloat = 0.005
    """Change of the coefficient after each step: up if the entropy of the step was at or below the
    target, otherwise down."""
    min_coef: NonNegativeFloat = 0.0
    """Lowest coefficient."""
    max_coef: NonNegativeFloat = 1.0
    """Highest coefficient."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_coef > self.max_coef:
            raise ValueError(
                f"min_coef = {self.min_coef} is above max_coef = {self.max_coef}; lower min_coef"
            )
        return self


class _PolicyGradient(Section):
    zero_variance_groups: Literal["replace", "keep"] = "replace"
    """Treatment of groups whose rewards are all equal, and with credit = "turn" also the rewards of
    their turns. "replace" plays other groups instead, because a group baseline makes all of their
    advantages zero. Groups of a function in `advantages` are always kept."""
    max_group_batches: Annotated[int, Field(ge=2)] = 3
    """Maximum number of groups that are played for one step, as a multiple of
    training.groups_per_step, if zero_variance_groups = "replace". At the limit, groups of equal
    rewards are no longer replaced, and the step trains on them too."""
    loss: PolicyLoss = ClipLoss()
    """The policy loss."""
    correction: Correction = TokenTis()
    """The correction for tokens that were sampled with other weights than the learner's."""
    geometric_mask: tuple[PositiveFloat, PositiveFloat] | None = (0.5, 2.0)
    """Range of the mean ratio of learner to sampler; sequences outside of it are masked. null
    masks none. Has no effect if old_logprobs = "rollout"."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Denominator of the loss, which is always computed over the whole minibatch."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Source of the old log-probs: the learner's weights at the start of the step, or the
    sampler."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence from the reference model, the initial policy, in the first
    step. 0 loads no reference model."""
    kl_coef_final: NonNegativeFloat | None = None
    """Final coefficient of the KL divergence, reached linearly. null keeps kl_coef."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the first step."""
    entropy_coef_final: NonNegativeFloat | None = None
    """Final coefficient of the entropy bonus, reached linearly. null keeps entropy_coef."""
    entropy_control: EntropyControl | None = None
    """Control that changes the coefficient of the entropy bonus from step to step, starting at
    entropy_coef. null keeps to entropy_coef and entropy_coef_final."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence: k2 or k3 in the loss, k1 in the reward."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Use of the KL divergence: a term of the loss, or a penalty on the reward of each token."""
    anneal_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the run after which entropy_coef and kl_coef reach their final values."""

    @property
    def sampler_comparison(self) -> str | None:
        """The setting that compares log-probs of sampler and learner, as "field = value"."""
        if self.correction.kind != "off":
            return f"correction.kind = '{self.correction.kind}'"
        if self.old_logprobs == "rollout":
            return "old_logprobs = 'rollout'"
        if self.geometric_mask is not None:
            return f"geometric_mask = {list(self.geometric_mask)}"
        return None

    @model_validator(mode="after")
    def _check_ratios(self) -> Self:
        if self.old_logprobs == "rollout" and self.correction.kind != "off":
            raise ValueError(
                "old_logprobs = 'rollout' already compares with the sampler, so "
                f"correction.kind = '{self.correction.kind}' would count the difference twice; "
                "set correction = {kind = 'off'} or old_logprobs = 'recompute'"
            )
        if self.loss.kind == "gspo" and self.aggregation != "sequence_mean":
            raise ValueError(
                "loss.kind = 'gspo' has one ratio per sequence and does not support aggregation = "
                f"'{self.aggregation}'; set aggregation = 'sequence_mean'"
            )
        if self.geometric_mask and not self.geometric_mask[0] < 1 < self.geometric_mask[1]:
            raise ValueError(
                "geometric_mask must be [low, high] with low < 1 < high, or it masks samples of "
                f"the learner's own policy, got {list(self.geometric_mask)}; the default is "
                "[0.5, 2.0]"
            )
        return self

    @model_validator(mode="after")
    def _check_entropy_control(self) -> Self:
        if self.entropy_control is not None and self.entropy_coef_final is not None:
            raise ValueError(
                f"entropy_coef_final = {self.entropy_coef_final} has no effect, because "
                "entropy_control changes the coefficient; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_divergence(self) -> Self:
        if self.kl_coef == 0 and self.kl_coef_final:
            raise ValueError(
                f"kl_coef_final = {self.kl_coef_final} needs a reference model, but kl_coef = 0 "
                "loads none; set kl_coef to a small number above 0"
            )
        if self.kl_placement == "reward" and self.kl_coef == 0:
            raise ValueError(
                "kl_placement = 'reward' has no effect with kl_coef = 0; set kl_coef, for example "
                "to 0.05, or remove kl_placement"
            )
        if self.kl_placement == "reward" and self.kl_estimator != "k1":
            raise ValueError(
                f"kl_estimator = '{self.kl_estimator}' in the reward does not lead to the gradient "
                "of the divergence; set kl_estimator = 'k1' or kl_placement = 'loss'"
            )
        if self.kl_placement == "loss" and self.kl_coef > 0 and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator = 'k1' in the loss has an expected gradient of zero, so it has no "
                "effect; set kl_estimator = 'k3' or 'k2', or kl_placement = 'reward'"
            )
        return self


class GrpoConfig(_PolicyGradient):
    """Group relative policy optimization, and related algorithms without a critic."""

    kind: Literal["grpo"] = "grpo"
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """Value that is subtracted from a reward: the mean of its group, the mean of the other episodes
    of its group, or none."""
    scale: Literal["none", "group", "batch"] = "none"
    """Divisor of an advantage: none, or the standard deviation of the rewards of its group, or of
    its environment in the batch."""
    credit: Literal["episode", "turn"] = "episode"
    """Reward of a turn: the reward of the whole episode, or the rewards from this turn on, compared
    with the episodes of the group that reached the same turn."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per turn. Only for credit = "turn"."""
    advantages: ImportPath | None = None
    """Function that replaces baseline, scale and credit. It is called with the episodes of a group
    that have a `reward`, and returns one advantage for each (docs/algorithms.md)."""

    @model_validator(mode="after")
    def _check_advantages(self) -> Self:
        replaced_fields = ("baseline", "scale", "credit")
        defaults = {name: type(self).model_fields[name].default for name in replaced_fields}
        changed_fields = [
            f"{name} = '{getattr(self, name)}'"
            for name, default in defaults.items()
            if getattr(self, name) != default
        ]
        if self.advantages is not None and changed_fields:
            raise ValueError(
                f"{' and '.join(changed_fields)} has no effect, because advantages = "
                f"'{self.advantages}' "
                "computes the advantages; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_baseline(self) -> Self:
        if self.credit == "episode" and self.gamma != 1:
            raise ValueError(
                f"gamma = {self.gamma} discounts turns, but credit = 'episode' treats all turns "
                "alike; set credit = 'turn' or gamma = 1"
            )
        if self.baseline == "none" and self.scale != "none":
            raise ValueError(
                f"scale = '{self.scale}' divides by a deviation from the mean, but baseline = "
                "'none' subtracts no mean; set scale = 'none' or baseline = 'mean'"
            )
        if self.baseline == "none" and self.zero_variance_groups == "replace":
            raise ValueError(
                "baseline = 'none' learns from groups of equal rewards too, but "
                "zero_variance_groups = 'replace' removes them; set zero_variance_groups = "
                "'keep' or baseline = 'mean'"
            )
        return self


class ReinforceConfig(_PolicyGradient):
    """REINFORCE++: discounted returns per token, whitened over the whole batch."""

    kind: Literal["reinforce"] = "reinforce"
    zero_variance_groups: Literal["replace", "keep"] = "keep"
    """Treatment of groups whose rewards are all equal. "keep" trains on them, because their
    advantages relative to the whole batch are not zero."""
    baseline: Literal["none", "mean"] = "none"
    """Value that is subtracted from a reward before the returns: none, or the mean of its group."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token."""


class HeadCritic(Section):
    """A critic that is a value head of the policy: cheap, with shared features."""

    kind: Literal["head"] = "head"
    learning_rate: LearningRate | None = None
    """Peak learning rate of the head, which follows the schedule of the policy's learning rate.
    null takes the policy's peak."""


class ModelCritic(Section):
    """A critic that is a separate model.

    It doubles the computation, and does not change the policy's weights.
    """

    kind: Literal["model"] = "model"
    path: PathText | None = None
    """Initial critic: a folder or Hugging Face id of a language model or of a reward model, or the
    folder `critic` in the model of a checkpoint. null copies the policy."""
    learning_rate: LearningRate | None = None
    """Peak learning rate of the critic, which follows the schedule of the policy's learning rate.
    null takes the policy's peak."""


CriticConfig = Annotated[HeadCritic | ModelCritic, Field(discriminator="kind"), assume_kind("head")]


class PpoConfig(_PolicyGradient):
    """PPO: a critic predicts returns, and advantages are relative to its predictions."""

    kind: Literal["ppo"] = "ppo"
    zero_variance_groups: Literal["replace", "keep"] = "keep"
    """Treatment of groups whose rewards are all equal. "keep" trains on them, because the critic
    learns from them."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per sampled token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Decay of generalized advantage estimation per sampled token."""
    value_coef: PositiveFloat = 0.5
    """Coefficient of the value loss."""
    value_clip: PositiveFloat | None = 0.2
    """Largest change of a value from its old prediction in one training step. null does not clip
    values."""
    normalise_advantages: bool = True
    """Give the advantages of a minibatch mean 0 and standard deviation 1."""
    critic: CriticConfig = HeadCritic()
    """The model that predicts the returns."""


AlgorithmConfig = Annotated[
    GrpoConfig | ReinforceConfig | PpoConfig, Field(discriminator="kind"), assume_kind("grpo")
]

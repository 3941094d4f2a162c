"""How rewards become gradients. Formulas and sources: `ludus.trainer.algorithms`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ludus.proto.config.section import (
    ImportPath,
    LearningRate,
    NonNegativeFloat,
    PositiveFloat,
    Section,
    default_kind,
)

BelowRatio = Annotated[float, Field(gt=0, le=1)]
"""How far below 1 a ratio may fall; 1 lets it fall to 0."""

Cap = Annotated[float, Field(ge=1)]
"""Largest weight; below 1 it would scale down what the learner itself sampled."""


class ClipLoss(Section):
    """PPO's clipped ratio per token, with clip-higher and dual clip."""

    kind: Literal["clip"] = "clip"
    clip_low: BelowRatio = 0.2
    """The ratio is clipped at 1 - clip_low where the advantage is negative."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped at 1 + clip_high where the advantage is positive."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bounds the loss of a negative advantage at dual_clip * |A|; null turns it off."""


class GspoLoss(Section):
    """One clipped ratio per sequence: the geometric mean of the token ratios."""

    kind: Literal["gspo"] = "gspo"
    clip_low: BelowRatio = 3e-4
    """The sequence ratio is clipped at 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The sequence ratio is clipped at 1 + clip_high."""


class CispoLoss(Section):
    """The log-prob weighted by a clipped ratio that has no gradient: no token loses its own."""

    kind: Literal["cispo"] = "cispo"
    clip_low: BelowRatio = 1.0
    """The ratio is clipped at 1 - clip_low; 1 does not clip it."""
    clip_high: PositiveFloat = 4.0
    """The ratio is clipped at 1 + clip_high."""


class FunctionLoss(Section):
    """A function of the run's own, for what the others do not have."""

    kind: Literal["function"] = "function"
    function: ImportPath
    """Called with logprobs, old_logprobs, advantages and mask, [N, T] each; returns the loss of
    every token, [N, T] (docs/algorithms.md)."""


class TokenTis(Section):
    """Truncated importance weight per token for sampler and learner that differ."""

    kind: Literal["token_tis"] = "token_tis"
    cap: Cap = 2.0
    """Largest weight."""


class SequenceTis(Section):
    """Truncated importance weight per sequence."""

    kind: Literal["sequence_tis"] = "sequence_tis"
    cap: Cap = 5.0
    """Largest weight."""


class SequenceMask(Section):
    """Importance weight per sequence, and none for sequences beyond the cap."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    cap: Cap = 3.0
    """Largest weight; a sequence above it is left out."""


class IcePop(Section):
    """Importance weight per token, and none for tokens outside a range."""

    kind: Literal["icepop"] = "icepop"
    low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Smallest ratio of learner to sampler."""
    high: Annotated[float, Field(gt=1)] = 5.0
    """Largest ratio of learner to sampler."""


class NoCorrection(Section):
    """No weight for the difference between sampler and learner."""

    kind: Literal["off"] = "off"


PolicyLoss = Annotated[
    ClipLoss | GspoLoss | CispoLoss | FunctionLoss,
    Field(discriminator="kind"),
    default_kind("clip"),
]
Correction = Annotated[
    TokenTis | SequenceTis | SequenceMask | IcePop | NoCorrection,
    Field(discriminator="kind"),
    default_kind("token_tis"),
]


class _PolicyGradient(Section):
    zero_variance_groups: Literal["replace", "keep"] = "replace"
    """What happens to a group whose rewards are all equal: to a group's baseline it is nothing to
    learn from. Without such a baseline it is, and kept by default."""
    loss: PolicyLoss = ClipLoss()
    """The policy loss."""
    correction: Correction = TokenTis()
    """The weight for tokens sampled by other weights than the learner's."""
    geometric_mask: tuple[PositiveFloat, PositiveFloat] | None = (0.5, 2.0)
    """Sequences whose mean learner-to-sampler ratio leaves this range are masked; with
    old_logprobs = "rollout" there is no such ratio, and none is."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """The loss's denominator, always over the whole optimizer step."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Where the ratio starts: the learner's weights at the start of the step, or the sampler."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight, in the first step, of the divergence from the reference model, which is the
    starting policy; 0 loads no reference model."""
    kl_coef_final: NonNegativeFloat | None = None
    """Weight of that divergence in the end, linear in between; null keeps it constant."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the first step."""
    entropy_coef_final: NonNegativeFloat | None = None
    """Weight of the entropy bonus in the end, linear in between; null keeps it constant."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence: k2 or k3 in the loss, k1 in the reward."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Whether the divergence is a term of the loss, or taken off the reward of each token."""
    anneal_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the run after which entropy_coef and kl_coef have their final values."""

    @property
    def compares_with_sampler(self) -> str | None:
        """The field, with its value, that sets the sampler's log-probs against the learner's."""
        if self.correction.kind != "off":
            return f"correction.kind = '{self.correction.kind}'"
        if self.old_logprobs == "rollout":
            return "old_logprobs = 'rollout'"
        if self.geometric_mask is not None:
            return f"geometric_mask = {list(self.geometric_mask)}"
        return None

    @model_validator(mode="after")
    def _ratios_fit(self) -> Self:
        if self.old_logprobs == "rollout" and self.correction.kind != "off":
            raise ValueError(
                "old_logprobs = 'rollout' already anchors the ratio at the sampler, and "
                f"correction.kind = '{self.correction.kind}' would count the difference twice; "
                "set correction = {kind = 'off'} or old_logprobs = 'recompute'"
            )
        if self.loss.kind == "gspo" and self.aggregation != "sequence_mean":
            raise ValueError(
                f"loss.kind = 'gspo' has one ratio per sequence, but aggregation = "
                f"'{self.aggregation}'; set aggregation = 'sequence_mean'"
            )
        if self.geometric_mask and not self.geometric_mask[0] < 1 < self.geometric_mask[1]:
            raise ValueError(
                f"geometric_mask expected [low, high] with low < 1 < high, got "
                f"{list(self.geometric_mask)}, which masks what the learner itself sampled; the "
                "default is [0.5, 2.0]"
            )
        return self

    @model_validator(mode="after")
    def _divergence_fits(self) -> Self:
        if self.kl_coef == 0 and self.kl_coef_final:
            raise ValueError(
                f"kl_coef_final = {self.kl_coef_final} rises from kl_coef = 0, which loads no "
                "reference model; set kl_coef to a small number above 0"
            )
        if self.kl_placement == "reward" and self.kl_coef == 0:
            raise ValueError(
                "kl_placement = 'reward' takes kl_coef = 0 times the divergence off the reward, "
                "which is nothing; set kl_coef, for example to 0.05, or remove kl_placement"
            )
        if self.kl_placement == "reward" and self.kl_estimator != "k1":
            raise ValueError(
                f"kl_estimator = '{self.kl_estimator}' in the reward does not have the gradient "
                "of the divergence, k1 has; set kl_estimator = 'k1' or kl_placement = 'loss'"
            )
        if self.kl_placement == "loss" and self.kl_coef > 0 and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator = 'k1' in the loss has a gradient of zero on average, so it holds "
                "nothing back; set kl_estimator = 'k3' or 'k2', or kl_placement = 'reward'"
            )
        return self


class GrpoConfig(_PolicyGradient):
    """Group relative policy optimisation, and its kin that need no critic."""

    kind: Literal["grpo"] = "grpo"
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted from a reward: the mean of its group, or of the others in it."""
    scale: Literal["none", "group", "batch"] = "none"
    """What an advantage is divided by: nothing, or the standard deviation of the rewards of its
    group, or of its environment in the batch."""
    credit: Literal["episode", "turn"] = "episode"
    """What a turn is credited with: the whole episode's reward, or what came from it on, against
    the episodes of the group that reached the same turn."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per turn; for credit = "turn"."""
    advantages: ImportPath | None = None
    """Replaces baseline, scale and credit: called with the scored episodes of a group, each with
    its `reward`; returns one advantage for each (docs/algorithms.md)."""

    @model_validator(mode="after")
    def _advantages_are_made_one_way(self) -> Self:
        replaced = ("baseline", "scale", "credit")
        said = [f"{name} = '{getattr(self, name)}'" for name in replaced if self._says(name)]
        if self.advantages is not None and said:
            raise ValueError(
                f"advantages = '{self.advantages}' makes them in place of {' and '.join(said)}; "
                "remove the one or the other"
            )
        return self

    def _says(self, name: str) -> bool:
        """Whether a field has another value than where nothing is said."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @model_validator(mode="after")
    def _baseline_fits(self) -> Self:
        if self.credit == "episode" and self.gamma != 1:
            raise ValueError(
                f"gamma = {self.gamma} discounts turns, but credit = 'episode' does not tell them "
                "apart; set credit = 'turn' or gamma = 1"
            )
        if self.baseline == "none" and self.scale != "none":
            raise ValueError(
                f"scale = '{self.scale}' divides by a deviation from the mean, but baseline = "
                "'none' subtracts no mean; set scale = 'none' or baseline = 'mean'"
            )
        if self.baseline == "none" and self.zero_variance_groups == "replace":
            raise ValueError(
                "baseline = 'none' learns from a group of equal rewards too, but "
                "zero_variance_groups = 'replace' takes it away; set zero_variance_groups = "
                "'keep' or baseline = 'mean'"
            )
        return self


class ReinforceConfig(_PolicyGradient):
    """REINFORCE++: discounted returns per token, whitened over the whole batch."""

    kind: Literal["reinforce"] = "reinforce"
    zero_variance_groups: Literal["replace", "keep"] = "keep"
    """What happens to a group whose rewards are all equal: to the mean of the batch it is
    something to learn from; to the mean of the group it is not."""
    baseline: Literal["none", "mean"] = "none"
    """What is subtracted from a reward before: nothing, or the mean of its group."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token."""


class HeadCritic(Section):
    """A critic that is a head on the policy's own trunk: little to compute, and shared features."""

    kind: Literal["head"] = "head"
    learning_rate: LearningRate | None = None
    """Peak learning rate of the head, which then follows the policy's course; null is the
    policy's own."""


class ModelCritic(Section):
    """A critic that is a model of its own: twice the work, and it moves no weight of the policy."""

    kind: Literal["model"] = "model"
    path: str | None = None
    """What it begins as: a folder or a Hugging Face id of a language model, of a reward model, or
    `critic` in the model's folder of a run's checkpoint; null copies the policy."""
    learning_rate: LearningRate | None = None
    """Peak learning rate of the critic, which then follows the policy's course; null is the
    policy's own."""


CriticConfig = Annotated[
    HeadCritic | ModelCritic, Field(discriminator="kind"), default_kind("head")
]


class PpoConfig(_PolicyGradient):
    """PPO: a critic predicts returns, and advantages are taken against it."""

    kind: Literal["ppo"] = "ppo"
    zero_variance_groups: Literal["replace", "keep"] = "keep"
    """What happens to a group whose rewards are all equal: to a critic it is something to learn
    from."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per sampled token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Decay of generalised advantage estimation per sampled token."""
    value_coef: PositiveFloat = 0.5
    """Weight of the value loss."""
    value_clip: PositiveFloat | None = 0.2
    """The value may move this far from its old prediction in one step; null does not clip it."""
    normalise_advantages: bool = True
    """Whether the advantages of an optimizer step get mean 0 and standard deviation 1."""
    critic: CriticConfig = HeadCritic()
    """What predicts the returns."""


AlgorithmConfig = Annotated[
    GrpoConfig | ReinforceConfig | PpoConfig, Field(discriminator="kind"), default_kind("grpo")
]

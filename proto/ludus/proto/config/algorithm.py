"""How rewards become gradients. Formulas and sources: `ludus.trainer.algorithms`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ludus.proto.config.section import NonNegativeFloat, PositiveFloat, Section, default_kind


class ClipLoss(Section):
    """PPO's clipped ratio per token, with clip-higher and dual clip."""

    kind: Literal["clip"] = "clip"
    clip_low: PositiveFloat = 0.2
    """The ratio is clipped at 1 - clip_low where the advantage is negative."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped at 1 + clip_high where the advantage is positive."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bounds the loss of a negative advantage at dual_clip * |A|; null turns it off."""


class GspoLoss(Section):
    """One clipped ratio per sequence: the geometric mean of the token ratios."""

    kind: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 3e-4
    """The sequence ratio is clipped at 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The sequence ratio is clipped at 1 + clip_high."""


class CispoLoss(Section):
    """The log-prob weighted by a clipped ratio that has no gradient: no token loses its own."""

    kind: Literal["cispo"] = "cispo"
    clip_low: PositiveFloat = 1.0
    """The ratio is clipped at 1 - clip_low; 1 does not clip it."""
    clip_high: PositiveFloat = 4.0
    """The ratio is clipped at 1 + clip_high."""


class TokenTis(Section):
    """Truncated importance weight per token for sampler and learner that differ."""

    kind: Literal["token_tis"] = "token_tis"
    cap: PositiveFloat = 2.0
    """Largest weight."""


class SequenceTis(Section):
    """Truncated importance weight per sequence."""

    kind: Literal["sequence_tis"] = "sequence_tis"
    cap: PositiveFloat = 5.0
    """Largest weight."""


class SequenceMask(Section):
    """Importance weight per sequence, and none for sequences beyond the cap."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    cap: PositiveFloat = 3.0
    """Largest weight; a sequence above it is left out."""


class IcePop(Section):
    """Importance weight per token, and none for tokens outside a range."""

    kind: Literal["icepop"] = "icepop"
    low: PositiveFloat = 0.5
    """Smallest ratio of learner to sampler."""
    high: PositiveFloat = 5.0
    """Largest ratio of learner to sampler."""


class NoCorrection(Section):
    """No weight for the difference between sampler and learner."""

    kind: Literal["off"] = "off"


PolicyLoss = Annotated[
    ClipLoss | GspoLoss | CispoLoss, Field(discriminator="kind"), default_kind("clip")
]
Correction = Annotated[
    TokenTis | SequenceTis | SequenceMask | IcePop | NoCorrection,
    Field(discriminator="kind"),
    default_kind("token_tis"),
]


class _PolicyGradient(Section):
    dead_groups: Literal["replace", "keep"] = "replace"
    """What happens to a group whose rewards are all equal: it teaches nothing."""
    loss: PolicyLoss = ClipLoss()
    """The policy loss."""
    correction: Correction = TokenTis()
    """The weight for tokens sampled by other weights than the learner's."""
    geometric_mask: tuple[PositiveFloat, PositiveFloat] | None = (0.5, 2.0)
    """Sequences whose mean learner-to-sampler ratio leaves this range are masked."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """The loss's denominator, always over the whole optimizer step."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Where the ratio starts: the learner's weights at the start of the step, or the sampler."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight, in the first step, of the k3 divergence from the reference model, which is the
    starting policy; 0 loads no reference model."""
    kl_coef_final: NonNegativeFloat | None = None
    """Weight of that divergence in the end, linear in between; null keeps it constant."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the first step."""
    entropy_coef_final: NonNegativeFloat | None = None
    """Weight of the entropy bonus in the end, linear in between; null keeps it constant."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Whether the divergence is a term of the loss, or taken off the reward of each token."""
    anneal_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the run after which entropy_coef and kl_coef have their final values."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
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
        if self.kl_coef == 0 and self.kl_coef_final:
            raise ValueError(
                f"kl_coef_final = {self.kl_coef_final} rises from kl_coef = 0, which loads no "
                "reference model; set kl_coef to a small number above 0"
            )
        if self.geometric_mask and self.geometric_mask[0] >= self.geometric_mask[1]:
            raise ValueError(
                f"geometric_mask expected [low, high] with low < high, got "
                f"{list(self.geometric_mask)}; the default is [0.5, 2.0]"
            )
        return self


class GrpoConfig(_PolicyGradient):
    """Group relative policy optimisation, and its kin that need no critic."""

    kind: Literal["grpo"] = "grpo"
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted from a reward: the mean of its group, or of the others in it."""
    scale: Literal["none", "group", "batch"] = "none"
    """What an advantage is divided by: nothing, or the standard deviation of group or batch."""
    credit: Literal["episode", "turn"] = "episode"
    """What a turn is credited with: the whole episode's reward, or what came from it on."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per turn; for credit = "turn"."""


class ReinforceConfig(_PolicyGradient):
    """REINFORCE++: discounted returns per token, whitened over the whole batch."""

    kind: Literal["reinforce"] = "reinforce"
    baseline: Literal["none", "mean"] = "none"
    """What is subtracted from a reward before: nothing, or the mean of its group."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token."""


class PpoConfig(_PolicyGradient):
    """PPO: a value head predicts returns, and advantages are taken against it."""

    kind: Literal["ppo"] = "ppo"
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


AlgorithmConfig = Annotated[
    GrpoConfig | ReinforceConfig | PpoConfig, Field(discriminator="kind"), default_kind("grpo")
]

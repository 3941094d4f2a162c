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


class NoCorrection(Section):
    """No weight for the difference between sampler and learner."""

    kind: Literal["off"] = "off"


PolicyLoss = Annotated[ClipLoss | GspoLoss, Field(discriminator="kind"), default_kind("clip")]
Correction = Annotated[
    TokenTis | SequenceTis | NoCorrection, Field(discriminator="kind"), default_kind("token_tis")
]


class GrpoConfig(Section):
    """Group relative policy optimisation."""

    kind: Literal["grpo"] = "grpo"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted from a reward: the mean of its group, or of the others in it."""
    scale: Literal["none", "group", "batch"] = "none"
    """What an advantage is divided by: nothing, or the standard deviation of group or batch."""
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

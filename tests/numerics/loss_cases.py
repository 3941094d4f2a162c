"""Random inputs of the policy loss, and the published formulas as loops over tokens.

The loops share no code with `ludus.trainer.algorithms`. They contain no masks: a row of a case is
the list of its sampled tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ludus.proto.config import GrpoConfig

LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "cispo", "gspo")
"""TRL's names; gspo is TRL's grpo with importance_sampling_level = "sequence"."""
CORRECTIONS = ("off", "token_tis", "sequence_tis", "sequence_mask", "icepop")


@dataclass(frozen=True)
class LossCase:
    """Log-probs of the tokens of some sequences, and the settings of a loss. Shapes are [N, T]."""

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    """[N, 1]"""
    lengths: list[int]
    """Number of sampled tokens of each row; 0 for a row of padding."""
    loss_type: str
    correction: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    """TRL's delta."""
    kl_coef: float
    cap: float
    """Largest weight of a correction."""
    low: float
    """Smallest weight of icepop."""
    max_tokens: int

    @property
    def mask(self) -> Tensor:
        """bool [N, T]"""
        return torch.arange(self.logprobs.shape[1]) < torch.tensor(self.lengths)[:, None]

    @property
    def config(self) -> GrpoConfig:
        """The same settings as a configuration of Ludus."""
        loss: dict[str, Any] = {"kind": "clip", "clip_low": self.clip_low}
        loss |= {"clip_high": self.clip_high, "dual_clip": self.dual_clip}
        if self.loss_type == "gspo":
            loss = {"kind": "gspo", "clip_low": self.clip_low, "clip_high": self.clip_high}
        elif self.loss_type == "cispo":
            loss = {"kind": "cispo", "clip_low": 1.0, "clip_high": self.clip_high}
        correction: dict[str, Any] = {"kind": self.correction}
        if self.correction == "icepop":
            correction |= {"low": self.low, "high": self.cap}
        elif self.correction != "off":
            correction["cap"] = self.cap
        aggregations = {"grpo": "sequence_mean", "gspo": "sequence_mean", "dr_grpo": "constant"}
        return GrpoConfig.model_validate(
            {
                "loss": loss,
                "correction": correction,
                "geometric_mask": None,
                "aggregation": aggregations.get(self.loss_type, "token_mean"),
                "kl_coef": self.kl_coef,
            }
        )


def make_case(seed: int, loss_type: str, dtype: torch.dtype) -> LossCase:
    """Return a random case. Padding is NaN, so that any use of it is visible."""
    generator, torch_generator = random.Random(f"loss {seed}"), torch.Generator()
    torch_generator.manual_seed(seed)
    num_rows, num_columns = generator.randint(1, 6), generator.randint(1, 8)
    lengths = [generator.randint(0, num_columns) for _ in range(num_rows)]
    lengths[generator.randrange(num_rows)] = num_columns

    def draw(scale: float) -> Tensor:
        shape = num_rows, num_columns
        return scale * torch.randn(shape, generator=torch_generator, dtype=torch.float64)

    old_logprobs = -draw(1.5).abs()
    difference = generator.choice([0.02, 0.3, 1.0])
    is_padding = torch.arange(num_columns) >= torch.tensor(lengths)[:, None]
    logprobs, rollout_logprobs, ref_logprobs, padded_old_logprobs = (
        values.masked_fill(is_padding, torch.nan).to(dtype)
        for values in (
            old_logprobs + draw(difference),
            old_logprobs + draw(generator.choice([0.01, 0.5])),
            old_logprobs + draw(0.5),
            old_logprobs,
        )
    )
    advantages = draw(1.0)[:, :1].to(dtype)
    if generator.random() < 0.2:
        advantages[0] = 0.0
    corrections = CORRECTIONS
    if loss_type == "gspo":
        # Weights per token give Ludus the gradient of GSPO-token, and TRL that of GSPO.
        corrections = ("off", "sequence_tis", "sequence_mask")
    clip_high = generator.choice([0.1, 0.28, 0.5])
    return LossCase(
        logprobs=logprobs,
        old_logprobs=padded_old_logprobs,
        rollout_logprobs=rollout_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        lengths=lengths,
        loss_type=loss_type,
        correction=generator.choice(corrections),
        clip_low=generator.choice([0.1, 0.2, 0.3]),
        clip_high=clip_high,
        dual_clip=generator.choice([None, 1.6, 3.0]) if loss_type != "gspo" else None,
        kl_coef=generator.choice([0.0, 0.05, 1.0]),
        cap=generator.choice([1.2, 2.0, 3.0]),
        low=generator.choice([0.3, 0.8]),
        max_tokens=generator.choice([8, 50]),
    )


def compute_loss_by_formula(case: LossCase, logprobs: Tensor) -> Tensor:
    """Return the loss of all rows, computed token by token."""
    sums, row_means = [], []
    for row, length in enumerate(case.lengths):
        if length == 0:
            continue
        losses = _compute_row_losses(case, row, [logprobs[row, t] for t in range(length)])
        sums.append(torch.stack(losses).sum())
        row_means.append(sums[-1] / length)
    total = torch.stack(sums).sum()
    if case.loss_type in ("grpo", "gspo"):
        return torch.stack(row_means).mean()
    if case.loss_type == "dr_grpo":
        return total / (len(sums) * case.max_tokens)
    return total / sum(case.lengths)


def _compute_row_losses(case: LossCase, row: int, logprobs: list[Tensor]) -> list[Tensor]:
    length = len(logprobs)
    old, rollout = case.old_logprobs[row, :length], case.rollout_logprobs[row, :length]
    weights = compute_weights(case, [float(value) for value in old - rollout])
    advantage = float(case.advantages[row])
    ratios = [(logprobs[t] - old[t]).exp() for t in range(length)]
    if case.loss_type == "gspo":
        mean_log_ratio = torch.stack([logprobs[t] - old[t] for t in range(length)]).mean()
        ratios = [mean_log_ratio.exp()] * length
    losses = []
    for t in range(length):
        if case.loss_type == "cispo":
            factor = min(float(ratios[t].detach()), 1 + case.clip_high)
            loss = -factor * advantage * logprobs[t]
        else:
            loss = -advantage * _clip(case, ratios[t], advantage)
        difference = case.ref_logprobs[row, t] - logprobs[t]
        losses.append(weights[t] * loss + case.kl_coef * (difference.exp() - difference - 1))
    return losses


def _clip(case: LossCase, ratio: Tensor, advantage: float) -> Tensor:
    """Return the ratio; a constant where clipping stops its gradient."""
    value = float(ratio.detach())
    if advantage >= 0 and value > 1 + case.clip_high:
        return torch.full_like(ratio, 1 + case.clip_high)
    if advantage < 0 and value < 1 - case.clip_low:
        return torch.full_like(ratio, 1 - case.clip_low)
    if advantage < 0 and case.dual_clip is not None and value > case.dual_clip:
        return torch.full_like(ratio, case.dual_clip)
    return ratio


def compute_weights(case: LossCase, log_ratios: list[float]) -> list[float]:
    """Return the correction of each token of a row, from log pi' - log mu."""
    token_weights = [math.exp(value) for value in log_ratios]
    row_weight = math.exp(sum(log_ratios))
    match case.correction:
        case "token_tis":
            return [min(weight, case.cap) for weight in token_weights]
        case "icepop":
            return [weight if case.low <= weight <= case.cap else 0.0 for weight in token_weights]
        case "sequence_tis":
            return [min(row_weight, case.cap)] * len(log_ratios)
        case "sequence_mask":
            return [row_weight if row_weight <= case.cap else 0.0] * len(log_ratios)
    return [1.0] * len(log_ratios)

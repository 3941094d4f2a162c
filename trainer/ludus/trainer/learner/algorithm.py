"""The parts of a training step that depend on the kind of algorithm.

    policy at the start of the step -- old log-probs, values --+
    reference model ------------------ log-probs --------------+--> LossTargets --> loss
    micro-batch ---------------------- rewards, advantages ----+

                advantages                                       whitened over
    grpo        from the batch, plus returns of the KL penalty   not whitened
    reinforce   the same                                         the step, with a KL penalty
    ppo         from rewards and values, by gae                  each optimizer step

Shapes: N = samples, S = sampled tokens of the longest sample. Tokens that were not sampled are
not part of these tensors, so generalized advantages skip the environment's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from ludus.proto.config import AlgorithmConfig, GrpoConfig, PpoConfig, ReinforceConfig
from ludus.trainer.algorithms.advantages import (
    discounted_returns,
    gae,
    kl_penalty,
    moments,
    returns,
    whiten,
)
from ludus.trainer.algorithms.losses import (
    LossInputs,
    LossTerms,
    loss_denominator,
    policy_gradient_loss,
    value_loss,
)
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.micro_batches import MicroBatch
from ludus.trainer.learner.model import PolicyOutput


@dataclass(frozen=True, slots=True)
class CriticTargets:
    """The critic's predictions when the step began, and its targets; both [N, S]."""

    old_values: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class LossTargets:
    """Fixed inputs of a micro-batch's loss; all [N, S]."""

    advantages: Tensor
    old_logprobs: Tensor | None
    """Log-probs when the step began; None if no update comes first, so that they equal the
    log-probs of the forward pass of the loss."""
    ref_logprobs: Tensor | None
    critic: CriticTargets | None


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """A micro-batch's share of the loss of its optimizer step."""

    total: Tensor
    """The sum of all losses, with a gradient."""
    terms: LossTerms
    value: Tensor | None
    """Loss of the critic, before it is multiplied by its coefficient; None without a critic."""


class Algorithm:
    """The configured algorithm: the targets and the loss of a training step."""

    def __init__(self, config: AlgorithmConfig, max_tokens: int) -> None:
        """`max_tokens` is the maximum length of an episode."""
        self._config = config
        self._ppo = config if isinstance(config, PpoConfig) else None
        # Discount per sampled token.
        self._gamma = 1.0 if isinstance(config, GrpoConfig) else config.gamma
        self._max_tokens = max_tokens
        self._recomputes = config.old_logprobs == "recompute"
        self._kl_in_reward = config.kl_placement == "reward"

    def needs_start(self, coefficients: Coefficients, *, is_updated: bool) -> bool:
        """Return whether a minibatch's targets need the policy's output before the step.

        `is_updated` says whether an update comes before any forward pass of the minibatch.
        """
        has_penalty = self._kl_in_reward and coefficients.kl > 0
        return self._ppo is not None or (self._recomputes and (is_updated or has_penalty))

    def make_targets(
        self,
        micro_batch: MicroBatch,
        start: PolicyOutput | None,
        reference: PolicyOutput | None,
        kl_coef: float,
    ) -> LossTargets:
        """Return the targets of a micro-batch, before whitening.

        `start` is the output of the policy before the step, None if it is not needed. `reference`
        is that of the reference model. `kl_coef` counts if the reward includes the KL penalty.
        """
        old_logprobs = micro_batch.gather_samples(start.logprobs) if start else None
        if not self._recomputes:
            old_logprobs = micro_batch.rollout_logprobs
        ref = micro_batch.gather_samples(reference.logprobs) if reference else None
        penalty = None
        if self._kl_in_reward and old_logprobs is not None and ref is not None:
            penalty = kl_penalty(old_logprobs, ref, micro_batch.mask, kl_coef)
        advantages, critic = self._advantages(micro_batch, start, penalty)
        return LossTargets(advantages, old_logprobs, ref, critic)

    def whiten_targets(
        self,
        targets: Sequence[Sequence[LossTargets]],
        minibatches: Sequence[Sequence[MicroBatch]],
    ) -> list[list[LossTargets]]:
        """Return the targets of all minibatches, whitened if configured; a collective."""
        if self._ppo is not None and self._ppo.normalise_advantages:
            return [_whiten_all(*pair) for pair in zip(targets, minibatches, strict=True)]
        # Without a KL penalty in the reward, `make_batch` has already whitened the advantages.
        if isinstance(self._config, ReinforceConfig) and self._kl_in_reward:
            whitened = iter(_whiten_all([*chain(*targets)], [*chain(*minibatches)]))
            return [[next(whitened) for _ in minibatch] for minibatch in minibatches]
        return [list(minibatch) for minibatch in targets]

    def loss(
        self,
        micro_batch: MicroBatch,
        output: PolicyOutput,
        targets: LossTargets,
        num_sampled: Tensor,
        coefficients: Coefficients,
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch, from the current output of the policy and the critic.

        `num_sampled` [N] are the sampled tokens of each sample of the optimizer step, on all ranks.
        """
        assert output.entropies is not None
        logprobs = micro_batch.gather_samples(output.logprobs)
        old_logprobs = targets.old_logprobs
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old_logprobs is None else old_logprobs,
            rollout_logprobs=micro_batch.rollout_logprobs,
            ref_logprobs=targets.ref_logprobs,
            entropies=micro_batch.gather_samples(output.entropies),
            advantages=targets.advantages,
            mask=micro_batch.mask,
        )
        terms = policy_gradient_loss(
            inputs,
            self._config,
            denominator=loss_denominator(num_sampled, self._config.aggregation, self._max_tokens),
            entropy_coef=coefficients.entropy,
            kl_coef=coefficients.kl,
        )
        if self._ppo is None:
            return MicroBatchLoss(terms.loss, terms, None)
        assert output.values is not None and targets.critic is not None
        value = value_loss(
            micro_batch.gather_samples(output.values),
            targets.critic.old_values,
            targets.critic.returns,
            micro_batch.mask,
            self._ppo.value_clip,
            denominator=int(num_sampled.sum()),
        )
        return MicroBatchLoss(terms.loss + self._ppo.value_coef * value, terms, value)

    def _advantages(
        self, micro_batch: MicroBatch, start: PolicyOutput | None, penalty: Tensor | None
    ) -> tuple[Tensor, CriticTargets | None]:
        """Return the advantages, including the KL penalty's returns, and the critic's targets."""
        mask = micro_batch.mask
        if self._ppo is None:
            if penalty is None:
                return micro_batch.advantages, None
            return micro_batch.advantages + discounted_returns(penalty, mask, self._gamma), None
        assert start is not None and start.values is not None and start.last_values is not None
        rewards = micro_batch.rewards if penalty is None else micro_batch.rewards + penalty
        values = torch.where(mask, micro_batch.gather_samples(start.values), 0.0)
        advantages = gae(
            rewards,
            values,
            mask,
            micro_batch.terminated,
            start.last_values,
            self._gamma,
            self._ppo.lam,
        )
        return advantages, CriticTargets(values, returns(advantages, values, mask))


def _whiten_all(
    targets: Sequence[LossTargets], micro_batches: Sequence[MicroBatch]
) -> list[LossTargets]:
    """Scale advantages to mean 0 and deviation 1 over these targets on all ranks; a collective."""
    pairs = list(zip(targets, micro_batches, strict=True))
    total = torch.stack([moments(t.advantages, m.mask) for t, m in pairs]).sum(0)
    dist.all_reduce(total)
    return [replace(t, advantages=whiten(t.advantages, m.mask, total)) for t, m in pairs]

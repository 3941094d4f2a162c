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
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ludus.proto.config import AlgorithmConfig, GrpoConfig, PpoConfig, ReinforceConfig
from ludus.trainer.algorithms.advantages import discounted_returns, gae, kl_penalty, returns
from ludus.trainer.algorithms.aggregation import loss_denominator
from ludus.trainer.algorithms.moments import moments, whiten
from ludus.trainer.algorithms.policy_loss import LossInputs, LossTerms, policy_gradient_loss
from ludus.trainer.algorithms.value_loss import value_loss
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
class Denominators:
    """Denominators of the losses of an optimizer step."""

    policy: int
    critic: int


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """A micro-batch's share of the loss of its optimizer step."""

    total: Tensor
    """The sum of all losses, with a gradient."""
    terms: LossTerms
    value: Tensor | None
    """Loss of the critic, before it is multiplied by its coefficient; None without a critic."""


class Algorithm:
    """An algorithm without a critic: its advantages come with the batch."""

    has_critic: ClassVar[bool] = False

    def __init__(
        self,
        config: AlgorithmConfig,
        *,
        gamma: float,
        whitens_step: bool = False,
        whitens_minibatches: bool = False,
    ) -> None:
        """`gamma` is the discount per sampled token."""
        self._config = config
        self._gamma = gamma
        self._whitens_step = whitens_step
        self._whitens_minibatches = whitens_minibatches
        self._recomputes = config.old_logprobs == "recompute"
        self._kl_in_reward = config.kl_placement == "reward"

    def needs_start(self, coefficients: Coefficients, *, is_updated: bool) -> bool:
        """Return whether a minibatch's targets need the policy's output before the step.

        Args:
            coefficients: weights of the step.
            is_updated: whether an update comes before any forward pass of the minibatch.
        """
        has_penalty = self._kl_in_reward and coefficients.kl > 0
        return self.has_critic or (self._recomputes and (is_updated or has_penalty))

    def make_targets(
        self,
        micro_batch: MicroBatch,
        start: PolicyOutput | None,
        reference: PolicyOutput | None,
        kl_coef: float,
    ) -> LossTargets:
        """Return the targets of a micro-batch, before whitening.

        Args:
            micro_batch: samples.
            start: output of the policy before the step; None if it is not needed.
            reference: output of the reference model; None without a reference model.
            kl_coef: coefficient of the divergence, used if the reward includes the divergence.
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
        if self._whitens_minibatches:
            return [_whiten_all(*pair) for pair in zip(targets, minibatches, strict=True)]
        if self._whitens_step:
            whitened = iter(_whiten_all([*chain(*targets)], [*chain(*minibatches)]))
            return [[next(whitened) for _ in minibatch] for minibatch in minibatches]
        return [list(minibatch) for minibatch in targets]

    def denominators(self, num_sampled: Tensor, max_tokens: int) -> Denominators:
        """Return the denominators of an optimizer step.

        Args:
            num_sampled: [N] sampled tokens of each sample of the step, on all ranks.
            max_tokens: maximum length of an episode.
        """
        policy = loss_denominator(num_sampled, self._config.aggregation, max_tokens)
        return Denominators(policy, int(num_sampled.sum()))

    def loss(
        self,
        micro_batch: MicroBatch,
        output: PolicyOutput,
        targets: LossTargets,
        denominators: Denominators,
        coefficients: Coefficients,
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch, from the policy's current output."""
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
            denominator=denominators.policy,
            entropy_coef=coefficients.entropy,
            kl_coef=coefficients.kl,
        )
        return MicroBatchLoss(terms.loss, terms, None)

    def _advantages(
        self, micro_batch: MicroBatch, start: PolicyOutput | None, penalty: Tensor | None
    ) -> tuple[Tensor, CriticTargets | None]:
        """Return the advantages, including the KL penalty's returns, and the critic's targets."""
        if penalty is None:
            return micro_batch.advantages, None
        penalty_returns = discounted_returns(penalty, micro_batch.mask, self._gamma)
        return micro_batch.advantages + penalty_returns, None


class PpoAlgorithm(Algorithm):
    """An algorithm with a critic, which turns rewards into advantages."""

    has_critic = True

    def __init__(self, config: PpoConfig) -> None:
        whitens = config.normalise_advantages
        super().__init__(config, gamma=config.gamma, whitens_minibatches=whitens)
        self._ppo = config

    def loss(
        self,
        micro_batch: MicroBatch,
        output: PolicyOutput,
        targets: LossTargets,
        denominators: Denominators,
        coefficients: Coefficients,
    ) -> MicroBatchLoss:
        """Return the loss of policy and critic."""
        policy = super().loss(micro_batch, output, targets, denominators, coefficients)
        assert output.values is not None and targets.critic is not None
        value = value_loss(
            micro_batch.gather_samples(output.values),
            targets.critic.old_values,
            targets.critic.returns,
            micro_batch.mask,
            self._ppo.value_clip,
            denominators.critic,
        )
        return MicroBatchLoss(policy.total + self._ppo.value_coef * value, policy.terms, value)

    def _advantages(
        self, micro_batch: MicroBatch, start: PolicyOutput | None, penalty: Tensor | None
    ) -> tuple[Tensor, CriticTargets | None]:
        assert start is not None and start.values is not None and start.last_values is not None
        mask = micro_batch.mask
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


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Build the configured algorithm."""
    match config:
        case GrpoConfig():
            return Algorithm(config, gamma=1.0)
        case ReinforceConfig():
            # Without a KL penalty, `make_batch` has already whitened the advantages.
            whitens_step = config.kl_placement == "reward"
            return Algorithm(config, gamma=config.gamma, whitens_step=whitens_step)
        case PpoConfig():
            return PpoAlgorithm(config)


def _whiten_all(
    targets: Sequence[LossTargets], micro_batches: Sequence[MicroBatch]
) -> list[LossTargets]:
    """Scale advantages to mean 0 and deviation 1 over these targets on all ranks; a collective."""
    pairs = list(zip(targets, micro_batches, strict=True))
    total = torch.stack([moments(t.advantages, m.mask) for t, m in pairs]).sum(0)
    dist.all_reduce(total)
    return [replace(t, advantages=whiten(t.advantages, m.mask, total)) for t, m in pairs]

"""The parts of a training step that depend on the kind of algorithm.

    policy at the start of the step -- old log-probs, values --+
    reference model ------------------ log-probs --------------+--> LossTargets --> loss
    micro-batch ---------------------- rewards, advantages ----+

                advantages                                       whitening
    grpo        from the batch, plus returns of the KL penalty   none
    reinforce   as in grpo                                       over the step, with a KL penalty
    ppo         from rewards and values, by gae                  over each optimizer step

Shapes: N = samples, S = sampled tokens of the longest sample. Tokens that were not sampled are
not part of these tensors, so generalized advantages skip the environment's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ludus.proto.config import AlgorithmConfig, GrpoConfig, PpoConfig, ReinforceConfig
from ludus.trainer.algorithms.advantages import (
    critic_targets,
    discounted_returns,
    gae,
    kl_penalty,
    moments,
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
    """Log-probs when the step began; None if they equal the log-probs of the loss, because there is
    no earlier update."""
    ref_logprobs: Tensor | None
    critic: CriticTargets | None
    kl_rewards: Tensor | None = None
    """KL penalties that the advantages include; None if they include no KL penalty."""


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """A micro-batch's share of the loss of its optimizer step."""

    total_loss: Tensor
    """The sum of all losses, with a gradient."""
    terms: LossTerms
    critic_loss: Tensor | None
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
        self._recomputes_logprobs = config.old_logprobs == "recompute"
        self._has_kl_in_reward = config.kl_placement == "reward"

    def needs_initial_output(self, coefficients: Coefficients, *, is_after_update: bool) -> bool:
        """Return whether a minibatch's targets need the policy's output at the start of the step.

        `is_after_update` says whether the policy is updated before a forward pass of the minibatch.
        """
        has_penalty = self._has_kl_in_reward and coefficients.kl > 0
        return self._ppo is not None or (
            self._recomputes_logprobs and (is_after_update or has_penalty)
        )

    def make_targets(
        self,
        micro_batch: MicroBatch,
        initial_output: PolicyOutput | None,
        reference_output: PolicyOutput | None,
        kl_coef: float,
    ) -> LossTargets:
        """Return the targets of a micro-batch, before whitening.

        `initial_output` is the policy's output at the start of the step; None if it is not needed.
        `reference_output` is the reference model's output. `kl_coef` is used only if the reward
        includes the KL penalty.
        """
        gather = micro_batch.gather_samples
        old_logprobs: Tensor | None = micro_batch.rollout_logprobs
        if self._recomputes_logprobs:
            old_logprobs = gather(initial_output.logprobs) if initial_output else None
        ref_logprobs = gather(reference_output.logprobs) if reference_output else None
        kl_rewards = None
        if self._has_kl_in_reward and old_logprobs is not None and ref_logprobs is not None:
            kl_rewards = kl_penalty(old_logprobs, ref_logprobs, micro_batch.mask, kl_coef)
        advantages, critic = self._compute_advantages(micro_batch, initial_output, kl_rewards)
        return LossTargets(advantages, old_logprobs, ref_logprobs, critic, kl_rewards)

    def add_later_penalties(
        self,
        targets: Sequence[Sequence[LossTargets]],
        minibatches: Sequence[Sequence[MicroBatch]],
        adds_next_return: np.ndarray,
    ) -> list[list[LossTargets]]:
        """Return the targets with the KL penalties of later sequences; call it on all ranks.

        `make_batch` has already added the other rewards of later sequences. `adds_next_return` [N]
        is that of the batch.
        """
        has_penalty = all(target.kl_rewards is not None for target in chain(*targets))
        if not (self._has_kl_in_reward and has_penalty and adds_next_return.any()):
            return [list(minibatch) for minibatch in targets]
        pairs = list(zip(chain(*targets), chain(*minibatches), strict=True))
        own_returns = torch.zeros(len(adds_next_return), 2, dtype=torch.float64)
        own_returns = own_returns.to(pairs[0][0].advantages.device)
        for target, batch in pairs:
            assert target.kl_rewards is not None
            returns = discounted_returns(target.kl_rewards.double(), batch.mask, self._gamma)
            own_returns[batch.sample_ids] = torch.stack([returns[:, 0], batch.mask.sum(1)], dim=1)
        dist.all_reduce(own_returns)
        later_returns = _sum_later_returns(own_returns.cpu(), adds_next_return, self._gamma)
        later_returns = later_returns.to(own_returns.device)
        new_targets = iter(
            [self._add_reward(*pair, later_returns[pair[1].sample_ids]) for pair in pairs]
        )
        return [[next(new_targets) for _ in minibatch] for minibatch in targets]

    def _add_reward(self, target: LossTargets, batch: MicroBatch, rewards: Tensor) -> LossTargets:
        """Return the targets after `rewards` [N] are added to the last token of each sample."""
        distances = (
            batch.mask.sum(1, keepdim=True)
            - 1
            - torch.arange(batch.mask.shape[1], device=batch.mask.device)
        )
        decay = self._gamma if self._ppo is None else self._gamma * self._ppo.lam
        added = rewards[:, None] * decay ** distances.clamp(min=0)
        added = torch.where(batch.mask, added, 0.0).to(target.advantages.dtype)
        critic = target.critic
        if critic is not None:
            critic = replace(critic, returns=critic.returns + added)
        return replace(target, advantages=target.advantages + added, critic=critic)

    def whiten_targets(
        self,
        targets: Sequence[Sequence[LossTargets]],
        minibatches: Sequence[Sequence[MicroBatch]],
    ) -> list[list[LossTargets]]:
        """Return the targets of all minibatches, whitened if configured; call it on all ranks."""
        if self._ppo is not None and self._ppo.normalise_advantages:
            return [_whiten_all(*pair) for pair in zip(targets, minibatches, strict=True)]
        # Without a KL penalty in the reward, `make_batch` has already whitened the advantages.
        if isinstance(self._config, ReinforceConfig) and self._has_kl_in_reward:
            whitened_targets = iter(_whiten_all([*chain(*targets)], [*chain(*minibatches)]))
            return [[next(whitened_targets) for _ in minibatch] for minibatch in minibatches]
        return [list(minibatch) for minibatch in targets]

    def compute_loss(
        self,
        micro_batch: MicroBatch,
        output: PolicyOutput,
        targets: LossTargets,
        num_sampled: Tensor,
        coefficients: Coefficients,
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch, from the current output of the policy and the critic.

        `num_sampled` [N] is the number of sampled tokens by sample of the optimizer step, all
        ranks.
        """
        assert output.entropies is not None
        logprobs, old_logprobs = micro_batch.gather_samples(output.logprobs), targets.old_logprobs
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
        critic_loss = value_loss(
            micro_batch.gather_samples(output.values),
            targets.critic.old_values,
            targets.critic.returns,
            micro_batch.mask,
            self._ppo.value_clip,
            denominator=int(num_sampled.sum()),
        )
        return MicroBatchLoss(terms.loss + self._ppo.value_coef * critic_loss, terms, critic_loss)

    def _compute_advantages(
        self,
        micro_batch: MicroBatch,
        output: PolicyOutput | None,
        kl_rewards: Tensor | None,
    ) -> tuple[Tensor, CriticTargets | None]:
        """Return the advantages, with the returns of the KL penalty, and the critic's targets."""
        mask = micro_batch.mask
        if self._ppo is None:
            if kl_rewards is None:
                return micro_batch.advantages, None
            return micro_batch.advantages + discounted_returns(kl_rewards, mask, self._gamma), None
        assert output is not None and output.values is not None and output.last_values is not None
        rewards = micro_batch.rewards if kl_rewards is None else micro_batch.rewards + kl_rewards
        values = torch.where(mask, micro_batch.gather_samples(output.values), 0.0)
        terminated, gamma, lam = micro_batch.terminated, self._gamma, self._ppo.lam
        advantages = gae(rewards, values, mask, terminated, output.last_values, gamma, lam)
        return advantages, CriticTargets(values, critic_targets(advantages, values, mask))


def _sum_later_returns(own_returns: Tensor, adds_next_return: np.ndarray, gamma: float) -> Tensor:
    """Return [N] the discounted returns of the sequences that follow each sample in its episode.

    `own_returns` [N, 2] has each sample's return at its first token, and its number of tokens.
    """
    later_returns = torch.zeros(len(own_returns), dtype=own_returns.dtype)
    for index in reversed(np.flatnonzero(adds_next_return).tolist()):
        own_return, num_tokens = own_returns[index + 1].tolist()
        next_return = own_return + gamma ** (num_tokens - 1) * float(later_returns[index + 1])
        later_returns[index] = gamma * next_return
    return later_returns


def _whiten_all(
    targets: Sequence[LossTargets], micro_batches: Sequence[MicroBatch]
) -> list[LossTargets]:
    """Scale advantages to mean 0 and deviation 1 over the targets of all ranks; a collective."""
    pairs = list(zip(targets, micro_batches, strict=True))
    all_moments = [moments(target.advantages, batch.mask) for target, batch in pairs]
    total_moments = torch.stack(all_moments).sum(0)
    dist.all_reduce(total_moments)
    return [
        replace(target, advantages=whiten(target.advantages, micro_batch.mask, total_moments))
        for target, micro_batch in pairs
    ]

"""What the kinds of algorithm differ in for the learner, decided once, when it is built.

    policy at the start of the step -- old log-probs, values --+
    reference model ------------------ its log-probs ----------+--> Targets --> loss
    micro-batch ---------------------- rewards, advantages ----+

                advantages                                      whitened over
    grpo        of the batch, plus what the divergence earned   nothing
    reinforce   the same                                        the step, where that is added
    ppo         rewards and values --gae--> advantages          each optimizer step

Shapes: N = samples, S = sampled tokens of the longest. What was not sampled is not there, so
generalised advantages step over the environment's text by themselves.
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
from ludus.trainer.algorithms.policy_loss import LossTerms, policy_gradient_loss
from ludus.trainer.algorithms.value_loss import value_loss
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.micro_batches import MicroBatch
from ludus.trainer.learner.model import PolicyOutput


@dataclass(frozen=True, slots=True)
class CriticTargets:
    """What a critic said, and should have said; both [N, S]."""

    old_values: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """What the loss of a micro-batch compares the policy with; all [N, S]."""

    advantages: Tensor
    old_logprobs: Tensor | None
    """None: the weights have not moved since, so the policy's own answer is the old one."""
    ref_logprobs: Tensor | None
    critic: CriticTargets | None


@dataclass(frozen=True, slots=True)
class Denominators:
    """By what the losses of an optimizer step are divided."""

    policy: int
    critic: int


@dataclass(frozen=True, slots=True)
class Loss:
    """What a micro-batch adds to the loss of its optimizer step."""

    total: Tensor
    """Has the gradient."""
    terms: LossTerms
    value: Tensor | None
    """Of the critic, before its weight."""


class Algorithm:
    """Advantages come with the batch."""

    has_critic: ClassVar[bool] = False

    def __init__(
        self,
        config: AlgorithmConfig,
        *,
        gamma: float,
        whitens_step: bool = False,
        whitens_minibatches: bool = False,
    ) -> None:
        """`gamma` discounts, per sampled token, what the divergence earned."""
        self._config = config
        self._gamma = gamma
        self._whitens_step = whitens_step
        self._whitens_minibatches = whitens_minibatches
        self._recomputes = config.old_logprobs == "recompute"
        self._kl_in_reward = config.kl_placement == "reward"

    def needs_start(self, coefficients: Coefficients, *, meets_moved: bool) -> bool:
        """Whether the targets of a minibatch need the policy's answers before the step.

        One that meets the weights unmoved, and only so, needs none: its own answer is the old one.
        """
        has_penalty = self._kl_in_reward and coefficients.kl > 0
        return self.has_critic or (self._recomputes and (meets_moved or has_penalty))

    def targets(
        self,
        micro_batch: MicroBatch,
        start: PolicyOutput | None,
        reference: PolicyOutput | None,
        kl_coef: float,
    ) -> Targets:
        """The targets of a micro-batch, before anything is whitened.

        Args:
            micro_batch: the samples.
            start: what the policy says before the step; None where nothing needs it.
            reference: what the reference model says; None without one.
            kl_coef: price of the divergence, where it is taken off the reward.
        """
        old = micro_batch.of_samples(start.logprobs) if start else None
        if not self._recomputes:
            old = micro_batch.rollout_logprobs
        ref = micro_batch.of_samples(reference.logprobs) if reference else None
        penalty = None
        if self._kl_in_reward and old is not None and ref is not None:
            penalty = kl_penalty(old, ref, micro_batch.mask, kl_coef)
        advantages, critic = self._advantages(micro_batch, start, penalty)
        return Targets(advantages, old, ref, critic)

    def whitened(
        self, targets: Sequence[Sequence[Targets]], minibatches: Sequence[Sequence[MicroBatch]]
    ) -> list[list[Targets]]:
        """The targets of all minibatches as the losses take them; a collective."""
        if self._whitens_minibatches:
            return [_whitened(t, m) for t, m in zip(targets, minibatches, strict=True)]
        if self._whitens_step:
            done = iter(_whitened([*chain(*targets)], [*chain(*minibatches)]))
            return [[next(done) for _ in minibatch] for minibatch in minibatches]
        return [list(of_minibatch) for of_minibatch in targets]

    def denominators(self, num_sampled: Tensor, max_tokens: int) -> Denominators:
        """Those of an optimizer step whose samples, on all ranks, hold `num_sampled` tokens."""
        policy = loss_denominator(num_sampled, self._config.aggregation, max_tokens)
        return Denominators(policy, int(num_sampled.sum()))

    def loss(
        self,
        micro_batch: MicroBatch,
        output: PolicyOutput,
        targets: Targets,
        denominators: Denominators,
        coefficients: Coefficients,
    ) -> Loss:
        """The loss of a micro-batch, of which the policy now says `output`."""
        assert output.entropies is not None
        terms = policy_gradient_loss(
            logprobs=micro_batch.of_samples(output.logprobs),
            old_logprobs=targets.old_logprobs,
            rollout_logprobs=micro_batch.rollout_logprobs,
            ref_logprobs=targets.ref_logprobs,
            entropy=micro_batch.of_samples(output.entropies),
            advantages=targets.advantages,
            loss_mask=micro_batch.mask,
            config=self._config,
            denominator=denominators.policy,
            entropy_coef=coefficients.entropy,
            kl_coef=coefficients.kl,
        )
        return Loss(terms.loss, terms, None)

    def _advantages(
        self, micro_batch: MicroBatch, start: PolicyOutput | None, penalty: Tensor | None
    ) -> tuple[Tensor, CriticTargets | None]:
        """The advantages, given what the divergence earned; and what the critic is to learn."""
        if penalty is None:
            return micro_batch.advantages, None
        earned = discounted_returns(penalty, micro_batch.mask, self._gamma)
        return micro_batch.advantages + earned, None


class Ppo(Algorithm):
    """A critic makes advantages of rewards, and learns from their returns."""

    has_critic = True

    def __init__(self, config: PpoConfig) -> None:
        whitens = config.normalise_advantages
        super().__init__(config, gamma=config.gamma, whitens_minibatches=whitens)
        self._ppo = config

    def loss(
        self,
        micro_batch: MicroBatch,
        output: PolicyOutput,
        targets: Targets,
        denominators: Denominators,
        coefficients: Coefficients,
    ) -> Loss:
        """The loss of policy and critic."""
        policy = super().loss(micro_batch, output, targets, denominators, coefficients)
        assert output.values is not None and targets.critic is not None
        value = value_loss(
            micro_batch.of_samples(output.values),
            targets.critic.old_values,
            targets.critic.returns,
            micro_batch.mask,
            self._ppo.value_clip,
            denominators.critic,
        )
        return Loss(policy.total + self._ppo.value_coef * value, policy.terms, value)

    def _advantages(
        self, micro_batch: MicroBatch, start: PolicyOutput | None, penalty: Tensor | None
    ) -> tuple[Tensor, CriticTargets | None]:
        assert start is not None and start.values is not None and start.last_values is not None
        mask = micro_batch.mask
        rewards = micro_batch.rewards if penalty is None else micro_batch.rewards + penalty
        values = torch.where(mask, micro_batch.of_samples(start.values), 0.0)
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
    """The algorithm that the configuration describes."""
    match config:
        case GrpoConfig():
            return Algorithm(config, gamma=1.0)
        case ReinforceConfig():
            # Otherwise `make_batch` has whitened them.
            whitens_step = config.kl_placement == "reward"
            return Algorithm(config, gamma=config.gamma, whitens_step=whitens_step)
        case PpoConfig():
            return Ppo(config)


def _whitened(targets: Sequence[Targets], micro_batches: Sequence[MicroBatch]) -> list[Targets]:
    """The targets with mean 0 and deviation 1 over these on all ranks; a collective."""
    pairs = list(zip(targets, micro_batches, strict=True))
    total = torch.stack([moments(t.advantages, m.mask) for t, m in pairs]).sum(0)
    dist.all_reduce(total)
    return [replace(t, advantages=whiten(t.advantages, m.mask, total)) for t, m in pairs]

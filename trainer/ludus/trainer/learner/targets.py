"""What the loss compares the policy with: fixed when the training step begins.

    policy at the start of the step -- old log-probs, values --+
    reference model ------------------ its log-probs ----------+--> Targets of each piece
    piece ---------------------------- rewards, advantages ----+

    grpo        advantages as they come with the batch
    reinforce   the same; with the divergence in the reward, less what it costs, then whitened
    ppo         rewards and values --gae--> advantages, whitened over the optimizer step

Shapes: N = samples, S = sampled tokens of the longest. What was not sampled is not there, so
generalised advantages step over the environment's text by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ludus.proto.config import AlgorithmConfig, PpoConfig, ReinforceConfig
from ludus.trainer.algorithms.advantages import discounted_returns, gae, kl_penalty, returns
from ludus.trainer.algorithms.moments import moments, whiten
from ludus.trainer.learner.micro_batches import MicroBatch
from ludus.trainer.learner.model import PolicyOutput


@dataclass(frozen=True, slots=True)
class CriticTargets:
    """What a critic said, and should have said; both [N, S]."""

    old_values: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """What one piece is trained towards; all [N, S]."""

    advantages: Tensor
    old_logprobs: Tensor | None
    """None: the weights have not moved since, so the policy's own answer is the old one."""
    ref_logprobs: Tensor | None
    critic: CriticTargets | None


def make_targets(
    piece: MicroBatch,
    start: PolicyOutput | None,
    reference: PolicyOutput | None,
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> Targets:
    """The targets of a piece, before anything is whitened.

    Args:
        piece: the samples.
        start: what the policy says before the step; None where nothing asks for it.
        reference: what the reference model says; None without one.
        algorithm: decides between the three ways above.
        kl_coef: price of the divergence, where it is taken off the reward.
    """
    old = piece.of_samples(start.logprobs) if start else None
    if algorithm.old_logprobs == "rollout":
        old = piece.rollout_logprobs
    ref = piece.of_samples(reference.logprobs) if reference else None
    penalty = None
    if algorithm.kl_placement == "reward" and old is not None and ref is not None:
        penalty = kl_penalty(old, ref, piece.mask, kl_coef)
    if isinstance(algorithm, PpoConfig):
        assert start is not None
        rewards = piece.rewards if penalty is None else piece.rewards + penalty
        critic, advantages = _critic_targets(piece, start, rewards, algorithm)
        return Targets(advantages, old, ref, critic)
    advantages = piece.advantages
    if penalty is not None:
        gamma = algorithm.gamma if isinstance(algorithm, ReinforceConfig) else 1.0
        advantages = advantages + discounted_returns(penalty, piece.mask, gamma)
    return Targets(advantages, old, ref, critic=None)


def whitened(targets: Sequence[Targets], pieces: Sequence[MicroBatch]) -> list[Targets]:
    """The targets with mean 0 and deviation 1 over these pieces on all ranks; a collective."""
    parts = [moments(t.advantages, p.mask) for t, p in zip(targets, pieces, strict=True)]
    total = torch.stack(parts).sum(0)
    dist.all_reduce(total)
    return [
        replace(t, advantages=whiten(t.advantages, p.mask, total))
        for t, p in zip(targets, pieces, strict=True)
    ]


def _critic_targets(
    piece: MicroBatch, start: PolicyOutput, rewards: Tensor, algorithm: PpoConfig
) -> tuple[CriticTargets, Tensor]:
    assert start.values is not None and start.last_values is not None
    values = torch.where(piece.mask, piece.of_samples(start.values), 0.0)
    advantages = gae(
        rewards,
        values,
        piece.mask,
        piece.terminated,
        start.last_values,
        algorithm.gamma,
        algorithm.lam,
    )
    return CriticTargets(values, returns(advantages, values, piece.mask)), advantages

"""One update of PPO (arXiv 1707.06347): from a batch to advantages, and some passes over it.

    Batch --critic--> values --stream_gae--> advantages, returns --+
      actor --> old log-probs -------------------------------------+--> epochs of minibatches

Shapes: T = steps, N = environments, B = T * N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ludus.proto.config import NetworkPpoConfig
from ludus.proto.errors import LudusError
from ludus.trainer.algorithms.advantages import stream_gae
from ludus.trainer.algorithms.policy_loss import clipped_surrogate, is_clipped, kl
from ludus.trainer.algorithms.ratios import token_log_ratio
from ludus.trainer.algorithms.value_loss import squared_error
from ludus.trainer.classic.adam import Adam
from ludus.trainer.classic.collector import Batch
from ludus.trainer.classic.policy import Moments, Policy
from ludus.trainer.core.streams import Stream, use_torch_stream

_STD_EPS = 1e-8
_MOST_LOST_IN_A_ROW = 10
"""Batches of which no minibatch has a finite gradient."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The steps of a batch, one after the other; all [B, ...]."""

    observations: Tensor
    """As the modules see them."""
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def of(self, rows: Tensor) -> Samples:
        """Some of them."""
        return Samples(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What an update came to; of the last pass where nothing else is said."""

    loss: float
    value_loss: float
    entropy: float
    """In nats per step."""
    policy_kl: float
    """k3 of the policy that played from the one that came of it, in nats per step."""
    clip_ratio: float
    """Share of the steps at which the clip held."""
    grad_norm: float
    """Before clipping, the mean of all minibatches."""
    explained_variance: float | None
    """Of the returns, by the values before the update; None where the returns are all equal."""
    num_epochs: int
    num_skipped: int
    """Minibatches of all passes whose gradient was not finite."""


class PpoUpdate:
    """Updates a policy, with an optimizer of its own."""

    def __init__(self, policy: Policy, config: NetworkPpoConfig, seed: int) -> None:
        self._policy = policy
        self._config = config
        self._seed = seed
        self._rates = [config.learning_rate]
        trained = [p for p in policy.parameters() if p.requires_grad]
        groups = [trained]
        if config.critic_learning_rate is not None:
            self._rates.append(config.critic_learning_rate)
            of_critic = {id(p) for p in policy.critic.parameters()}
            groups = [[p for p in trained if id(p) not in of_critic]]
            groups.append([p for p in trained if id(p) in of_critic])
        self.optimizer = Adam(groups)
        self.reward_scale = RewardScale(config.gamma) if config.scale_rewards else None
        self._num_lost = 0
        """Batches in a row from which nothing was learned."""

    def train(self, batch: Batch, update: int, fraction_left: float) -> UpdateMetrics:
        """What the `update`-th update came to.

        Args:
            fraction_left: of the learning rates.

        Raises:
            LudusError: ten batches in a row had no finite gradient.
        """
        rates = [rate * fraction_left for rate in self._rates]
        samples = self._samples(batch)
        sums = _Sums()
        num_epochs, limit = 0, self._config.target_kl
        for epoch in range(self._config.num_epochs):
            sums = _Sums(sums.grad_norms, sums.num_skipped)
            # What nobody will read is not computed.
            is_told = limit is not None or epoch + 1 == self._config.num_epochs
            for part in self._minibatches(samples, update, epoch):
                self._step(part, rates, sums, is_told)
            num_epochs += 1
            if limit is not None and sums.mean(sums.kls) > limit:
                break
        self._count_lost(is_lost=sums.num_skipped == len(sums.grad_norms))
        return sums.metrics(samples, num_epochs)

    def _count_lost(self, *, is_lost: bool) -> None:
        """Give up where batch after batch teaches nothing."""
        self._num_lost = self._num_lost + 1 if is_lost else 0
        if self._num_lost >= _MOST_LOST_IN_A_ROW:
            raise LudusError(
                f"the gradients of {_MOST_LOST_IN_A_ROW} batches in a row are not finite; see "
                "whether the environment's observations are, or lower the learning rate"
            )

    def _samples(self, batch: Batch) -> Samples:
        """What is learned from each step; the normaliser sees the batch only afterwards."""
        policy, (num_steps, num) = self._policy, batch.rewards.shape
        raw = torch.cat([batch.observations.flatten(0, 1), batch.cut_off_observations])
        prepared = policy.prepared(raw)
        values = policy.values(prepared)
        of_steps = values[: (num_steps + 1) * num].view(num_steps + 1, num)
        next_values = of_steps[1:].clone()
        next_values[batch.terminated] = 0.0
        if len(batch.cut_off):
            steps, places = batch.cut_off.T
            next_values[steps, places] = values[(num_steps + 1) * num :]
        rewards = batch.rewards
        if self.reward_scale is not None:
            rewards = self.reward_scale.scaled(rewards, batch.ended)
        config = self._config
        advantages = stream_gae(
            rewards, of_steps[:-1], next_values, batch.ended, config.gamma, config.lam
        ).flatten()
        size = batch.num_steps
        actions = batch.actions.flatten(0, 1)
        with torch.no_grad():
            logprobs, _ = policy.head.judge(policy.actor(prepared[:size]), actions)
        policy.see(raw[:size])
        old = values[:size]
        return Samples(prepared[:size], actions, logprobs, old, advantages, advantages + old)

    def _minibatches(self, samples: Samples, update: int, epoch: int) -> Iterator[Samples]:
        """Steps in random order, in parts of nearly equal size: a small rest would be noise."""
        size = len(samples.actions)
        num_parts = max(1, round(size / self._config.minibatch_size))
        if num_parts == 1:  # a mean has no order
            yield samples
            return
        with use_torch_stream(self._seed, Stream.NETWORK_ORDER, update, epoch):
            order = torch.randperm(size)
        for rows in order.to(self._policy.device).tensor_split(num_parts):
            yield samples.of(rows)

    def _step(self, samples: Samples, rates: list[float], sums: _Sums, is_told: bool) -> None:
        config, policy = self._config, self._policy
        advantages = samples.advantages
        if config.normalise_advantages and len(advantages) > 1:
            std, mean = torch.std_mean(advantages)
            advantages = (advantages - mean) / (std + _STD_EPS)
        output = policy.actor(samples.observations)
        logprobs, entropies = policy.head.judge(output, samples.actions)
        log_ratio = token_log_ratio(logprobs, samples.logprobs)
        surrogate = clipped_surrogate(log_ratio, advantages, config.clip, config.clip).mean()
        values = policy.critic(samples.observations).view(-1)
        errors = squared_error(values, samples.values, samples.returns, config.value_clip)
        of_values = 0.5 * errors.mean()
        loss = surrogate + config.value_coef * of_values
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropies.mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = self.optimizer.clip(config.max_grad_norm)
        sums.grad_norms.append(norm)
        if norm.isfinite():
            self.optimizer.step(rates)
        else:
            sums.num_skipped += 1
        if is_told:
            with torch.no_grad():
                clipped = is_clipped(log_ratio, advantages, config.clip, config.clip)
                divergence = kl(samples.logprobs, logprobs).mean()
                sums.take(loss, of_values, entropies.mean(), divergence, clipped.float().mean())


class RewardScale:
    """Divides rewards by the deviation of the discounted returns so far.

    As in https://github.com/openai/baselines, `VecNormalize`: R_t = gamma * R_t-1 + r_t, from 0
    with each episode.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._running: Tensor | None = None
        self._moments = Moments(())

    def scaled(self, rewards: Tensor, ended: Tensor) -> Tensor:
        """The rewards [T, N], by what was known before and what they add to it."""
        running = torch.zeros_like(rewards[0]) if self._running is None else self._running
        sums = []
        for reward, end in zip(rewards, ended, strict=True):
            running = self._gamma * running + reward
            sums.append(running)
            running = torch.where(end, 0.0, running)
        self._running = running
        self._moments.take(torch.cat(sums).cpu())
        return rewards / (self._moments.variance + _STD_EPS).sqrt().float().item()

    def state(self) -> dict[str, Tensor]:
        """All of it."""
        assert self._running is not None, "it has scaled nothing yet"
        return {"running": self._running, **self._moments.state_dict()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a `state`."""
        self._running = state["running"]
        self._moments.load_state_dict({k: v for k, v in state.items() if k != "running"})


class _Sums:
    """What the minibatches of a pass say; tensors, so that none of them is waited for."""

    def __init__(self, grad_norms: list[Tensor] | None = None, num_skipped: int = 0) -> None:
        self.grad_norms: list[Tensor] = grad_norms or []
        self.num_skipped = num_skipped
        self.losses: list[Tensor] = []
        self.value_losses: list[Tensor] = []
        self.entropies: list[Tensor] = []
        self.kls: list[Tensor] = []
        self.clip_ratios: list[Tensor] = []

    def take(self, *of_minibatch: Tensor) -> None:
        """Take in loss, value loss, entropy, divergence and clip ratio of a minibatch."""
        kept = (self.losses, self.value_losses, self.entropies, self.kls, self.clip_ratios)
        for values, value in zip(kept, of_minibatch, strict=True):
            values.append(value.detach())

    @staticmethod
    def mean(values: list[Tensor]) -> float:
        return float(torch.stack(values).mean())

    def metrics(self, samples: Samples, num_epochs: int) -> UpdateMetrics:
        spread = samples.returns.var()
        unexplained = (samples.returns - samples.values).var()
        return UpdateMetrics(
            loss=self.mean(self.losses),
            value_loss=self.mean(self.value_losses),
            entropy=self.mean(self.entropies),
            policy_kl=self.mean(self.kls),
            clip_ratio=self.mean(self.clip_ratios),
            grad_norm=self.mean(self.grad_norms),
            explained_variance=float(1 - unexplained / spread) if spread > 0 else None,
            num_epochs=num_epochs,
            num_skipped=self.num_skipped,
        )

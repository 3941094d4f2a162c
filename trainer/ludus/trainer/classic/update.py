"""The PPO update (arXiv 1707.06347) of a network.

NetworkBatch --> Samples --> num_epochs passes of minibatches --> metrics
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ludus.proto.config import NetworkPpoConfig
from ludus.proto.metrics import TrainMetric
from ludus.trainer.algorithms.advantages import stream_gae
from ludus.trainer.algorithms.losses import (
    clipped_surrogate,
    is_clipped,
    kl,
    squared_error,
    token_log_ratio,
)
from ludus.trainer.classic.episodes import NetworkBatch
from ludus.trainer.classic.policy import NetworkPolicy, RunningMoments
from ludus.trainer.core.stopping import check_skipped_updates
from ludus.trainer.core.streams import Stream, use_torch_stream

_ADAM_EPS = 1e-5
_STD_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Samples:
    """The steps of a batch, in random order or in the order of play; all [B, ...]."""

    observations: Tensor
    """Observations as the modules get them."""
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def select(self, rows: Tensor) -> Samples:
        """Return the samples with these indices."""
        return Samples(*(getattr(self, name)[rows] for name in self.__slots__))


class PpoUpdate:
    """Updates a policy by Adam."""

    def __init__(self, policy: NetworkPolicy, config: NetworkPpoConfig, seed: int) -> None:
        self._policy = policy
        self._config = config
        self._seed = seed
        self._parameters = [p for p in policy.parameters() if p.requires_grad]
        self._rates = [config.learning_rate]
        groups = [self._parameters]
        if config.critic_learning_rate is not None:
            self._rates.append(config.critic_learning_rate)
            critic_ids = {id(parameter) for parameter in policy.critic.parameters()}
            groups = [
                [p for p in self._parameters if (id(p) in critic_ids) is is_critic]
                for is_critic in (False, True)
            ]
        self.optimizer = torch.optim.Adam(
            [{"params": group} for group in groups], eps=_ADAM_EPS, fused=True
        )
        self.reward_scaler = RewardScaler(config.gamma) if config.scale_rewards else None
        self._num_skipped_batches = 0
        """Number of consecutive batches without a finite gradient."""

    def train(self, batch: NetworkBatch, update: int, rate_factor: float) -> dict[str, float]:
        """Update the policy with a batch; return metrics by TrainMetric.

        They are means over the last pass. The norm of the gradient is a mean over all passes.
        """
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * rate_factor
        samples = self._make_samples(batch)
        grad_norms: list[Tensor] = []
        metrics: list[Mapping[str, Tensor]] = []
        max_kl = self._config.target_kl
        for epoch in range(self._config.num_epochs):
            needs_metrics = max_kl is not None or epoch + 1 == self._config.num_epochs
            metrics = []
            for minibatch in self._minibatches(samples, update, epoch):
                norm, minibatch_metrics = self._step(minibatch, needs_metrics)
                grad_norms.append(norm)
                metrics.append(minibatch_metrics)
            if max_kl is not None and _mean(metrics, TrainMetric.POLICY_KL) > max_kl:
                break
        num_skipped = sum(not norm.isfinite() for norm in grad_norms)
        is_skipped = num_skipped == len(grad_norms)
        self._num_skipped_batches = self._num_skipped_batches + 1 if is_skipped else 0
        check_skipped_updates(
            self._num_skipped_batches,
            "check that the environment's observations are finite, or lower ppo.learning_rate",
        )
        values: dict[str, float] = {name: _mean(metrics, name) for name in metrics[0]}
        values[TrainMetric.GRAD_NORM] = float(torch.stack(grad_norms).mean())
        values[TrainMetric.NUM_SKIPPED_UPDATES] = num_skipped
        variance = samples.returns.var()
        if variance > 0:
            unexplained = (samples.returns - samples.values).var()
            values[TrainMetric.EXPLAINED_VARIANCE] = float(1 - unexplained / variance)
        return values

    def _make_samples(self, batch: NetworkBatch) -> Samples:
        """Compute values, advantages and log-probs, and then update the statistics."""
        policy, (num_steps, num_environments) = self._policy, batch.rewards.shape
        rows = torch.cat([batch.observations.flatten(0, 1), batch.truncated_observations])
        prepared = policy.prepare(rows)
        values = policy.values(prepared)
        num_step_values = (num_steps + 1) * num_environments
        step_values = values[:num_step_values].view(num_steps + 1, num_environments)
        next_values = step_values[1:].clone()
        next_values[batch.terminated] = 0.0
        if len(batch.truncations):
            steps, environments = batch.truncations.T
            next_values[steps, environments] = values[num_step_values:]
        rewards = batch.rewards
        if self.reward_scaler is not None:
            rewards = self.reward_scaler.scale(rewards, batch.finished)
        config = self._config
        advantages = stream_gae(
            rewards, step_values[:-1], next_values, batch.finished, config.gamma, config.lam
        ).flatten()
        size = batch.num_steps
        actions = batch.actions.flatten(0, 1)
        with torch.no_grad():
            logprobs, _ = policy.head.score(policy.actor(prepared[:size]), actions)
        policy.update_statistics(rows[:size])
        old_values = values[:size]
        return Samples(
            prepared[:size], actions, logprobs, old_values, advantages, advantages + old_values
        )

    def _minibatches(self, samples: Samples, update: int, epoch: int) -> Iterator[Samples]:
        """Yield the samples in random order, in minibatches of nearly equal size."""
        size = len(samples.actions)
        num_minibatches = max(1, round(size / self._config.minibatch_size))
        if num_minibatches == 1:  # the order has no effect on a mean
            yield samples
            return
        with use_torch_stream(self._seed, Stream.NETWORK_ORDER, update, epoch):
            order = torch.randperm(size)
        for rows in order.to(self._policy.device).tensor_split(num_minibatches):
            yield samples.select(rows)

    def _step(self, samples: Samples, needs_metrics: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Take an optimizer step; return the gradient's norm and, if needed, the metrics.

        They stay tensors, because reading them would wait for the device.
        """
        config, policy = self._config, self._policy
        advantages = samples.advantages
        if config.normalise_advantages and len(advantages) > 1:
            std, mean = torch.std_mean(advantages)
            advantages = (advantages - mean) / (std + _STD_EPS)
        output = policy.actor(samples.observations)
        logprobs, entropies = policy.head.score(output, samples.actions)
        log_ratio = token_log_ratio(logprobs, samples.logprobs)
        surrogate = clipped_surrogate(log_ratio, advantages, config.clip, config.clip).mean()
        values = policy.critic(samples.observations).view(-1)
        errors = squared_error(values, samples.values, samples.returns, config.value_clip)
        value_loss = 0.5 * errors.mean()
        loss = surrogate + config.value_coef * value_loss
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropies.mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._parameters, config.max_grad_norm, foreach=True)
        if norm.isfinite():
            self.optimizer.step()
        if not needs_metrics:
            return norm, {}
        with torch.no_grad():
            clipped = is_clipped(log_ratio, advantages, config.clip, config.clip)
            return norm, {
                TrainMetric.LOSS: loss.detach(),
                TrainMetric.VALUE_LOSS: value_loss.detach(),
                TrainMetric.ENTROPY: entropies.detach().mean(),
                TrainMetric.POLICY_KL: kl(samples.logprobs, logprobs).mean(),
                TrainMetric.CLIP_RATIO: clipped.float().mean(),
            }


class RewardScaler:
    """Divides rewards by the standard deviation of the discounted returns so far.

    As in `VecNormalize` of https://github.com/openai/baselines: R_t = gamma * R_t-1 + r_t, from 0
    in each episode.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._running: Tensor | None = None
        self._moments = RunningMoments(())

    def scale(self, rewards: Tensor, finished: Tensor) -> Tensor:
        """Add the rewards [T, N] to the statistics, and return the scaled rewards."""
        total = torch.zeros_like(rewards[0]) if self._running is None else self._running
        total = total.to(rewards.device)
        returns = []
        for reward, is_finished in zip(rewards, finished, strict=True):
            total = self._gamma * total + reward
            returns.append(total)
            total = torch.where(is_finished, 0.0, total)
        self._running = total
        self._moments.update(torch.cat(returns).cpu())
        return rewards / (self._moments.variance + _STD_EPS).sqrt().float().item()

    def state(self) -> dict[str, Tensor]:
        """Return the complete state."""
        assert self._running is not None, "the scaler has not been used"
        return {"running": self._running, **self._moments.state_dict()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from the result of `state`."""
        self._running = state["running"]
        self._moments.load_state_dict({k: v for k, v in state.items() if k != "running"})


def _mean(metrics: Sequence[Mapping[str, Tensor]], name: str) -> float:
    return float(torch.stack([minibatch_metrics[name] for minibatch_metrics in metrics]).mean())

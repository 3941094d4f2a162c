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
    """Steps of a batch, in the order of play or in random order; all tensors are [B, ...]."""

    observations: Tensor
    """Observations, normalized if the policy normalizes them."""
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def select(self, indices: Tensor) -> Samples:
        """Return the samples with these indices."""
        return Samples(*(getattr(self, name)[indices] for name in self.__slots__))


class PpoUpdate:
    """An updater of a policy, with the optimizer Adam."""

    def __init__(self, policy: NetworkPolicy, config: NetworkPpoConfig, seed: int) -> None:
        self._policy = policy
        self._config = config
        self._seed = seed
        self._parameters = [weight for weight in policy.parameters() if weight.requires_grad]
        self._learning_rates = [config.learning_rate]
        groups = [self._parameters]
        if config.critic_learning_rate is not None:
            self._learning_rates.append(config.critic_learning_rate)
            critic_ids = {id(weight) for weight in policy.critic.parameters()}
            groups = [
                [weight for weight in self._parameters if (id(weight) in critic_ids) is is_critic]
                for is_critic in (False, True)
            ]
        self.optimizer = torch.optim.Adam(
            [{"params": group} for group in groups], eps=_ADAM_EPS, fused=True
        )
        self.reward_scaler = RewardScaler(config.gamma) if config.scale_rewards else None
        self._num_skipped_batches = 0
        """Number of consecutive batches without a finite gradient."""

    def train(
        self, batch: NetworkBatch, update: int, learning_rate_factor: float
    ) -> dict[str, float]:
        """Update the policy with a batch; return metrics by TrainMetric.

        The metrics are means over the last pass, but the gradient norm is a mean over all passes.
        """
        for group, learning_rate in zip(
            self.optimizer.param_groups, self._learning_rates, strict=True
        ):
            group["lr"] = learning_rate * learning_rate_factor
        samples = self._make_samples(batch)
        grad_norms: list[Tensor] = []
        step_metrics: list[Mapping[str, Tensor]] = []
        max_kl = self._config.target_kl
        for epoch in range(self._config.num_epochs):
            needs_metrics = max_kl is not None or epoch + 1 == self._config.num_epochs
            step_metrics = []
            for minibatch in self._iterate_minibatches(samples, update, epoch):
                grad_norm, tensors = self._take_optimizer_step(minibatch, needs_metrics)
                grad_norms.append(grad_norm)
                step_metrics.append(tensors)
            if max_kl is not None and _compute_mean(step_metrics, TrainMetric.POLICY_KL) > max_kl:
                break
        num_skipped = sum(not grad_norm.isfinite() for grad_norm in grad_norms)
        is_skipped = num_skipped == len(grad_norms)
        self._num_skipped_batches = self._num_skipped_batches + 1 if is_skipped else 0
        check_skipped_updates(
            self._num_skipped_batches,
            "check that the environment's observations are finite, or lower ppo.learning_rate",
        )
        names = step_metrics[0]
        metrics: dict[str, float] = {name: _compute_mean(step_metrics, name) for name in names}
        metrics[TrainMetric.GRAD_NORM] = float(torch.stack(grad_norms).mean())
        metrics[TrainMetric.NUM_SKIPPED_UPDATES] = num_skipped
        variance = samples.returns.var()
        if variance > 0:
            unexplained_variance = (samples.returns - samples.values).var()
            metrics[TrainMetric.EXPLAINED_VARIANCE] = float(1 - unexplained_variance / variance)
        return metrics

    def _make_samples(self, batch: NetworkBatch) -> Samples:
        """Return the samples of a batch, and then update the observation statistics."""
        policy, (num_steps, num_environments) = self._policy, batch.rewards.shape
        observations = torch.cat([batch.observations.flatten(0, 1), batch.truncated_observations])
        inputs = policy.normalize_observations(observations)
        values = policy.predict_values(inputs)
        num_step_values = (num_steps + 1) * num_environments
        step_values = values[:num_step_values].view(num_steps + 1, num_environments)
        next_values = step_values[1:].clone()
        next_values[batch.terminated] = 0.0
        if len(batch.truncations):
            steps, environments = batch.truncations.T
            next_values[steps, environments] = values[num_step_values:]
        rewards = batch.rewards
        if self.reward_scaler is not None:
            rewards = self.reward_scaler.scale(rewards, batch.is_finished)
        config = self._config
        advantages = stream_gae(
            rewards, step_values[:-1], next_values, batch.is_finished, config.gamma, config.lam
        ).flatten()
        num_samples = batch.num_steps
        actions = batch.actions.flatten(0, 1)
        policy_inputs, old_values = inputs[:num_samples], values[:num_samples]
        with torch.no_grad():
            logprobs, _ = policy.head.score(policy.actor(policy_inputs), actions)
        policy.update_statistics(observations[:num_samples])
        returns = advantages + old_values
        return Samples(policy_inputs, actions, logprobs, old_values, advantages, returns)

    def _iterate_minibatches(self, samples: Samples, update: int, epoch: int) -> Iterator[Samples]:
        """Yield the samples in random order, in minibatches of nearly equal size."""
        num_samples = len(samples.actions)
        num_minibatches = max(1, round(num_samples / self._config.minibatch_size))
        if num_minibatches == 1:  # the order has no effect on a mean
            yield samples
            return
        with use_torch_stream(self._seed, Stream.NETWORK_ORDER, update, epoch):
            permutation = torch.randperm(num_samples)
        for indices in permutation.to(self._policy.device).tensor_split(num_minibatches):
            yield samples.select(indices)

    def _take_optimizer_step(
        self, samples: Samples, needs_metrics: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take an optimizer step; return the gradient norm and, if needed, the metrics.

        All of them are tensors, because converting them to numbers would wait for the device.
        """
        config, policy = self._config, self._policy
        advantages = samples.advantages
        if config.normalise_advantages and len(advantages) > 1:
            std, mean = torch.std_mean(advantages)
            advantages = (advantages - mean) / (std + _STD_EPS)
        output = policy.actor(samples.observations)
        logprobs, entropies = policy.head.score(output, samples.actions)
        log_ratio = token_log_ratio(logprobs, samples.logprobs)
        policy_loss = clipped_surrogate(log_ratio, advantages, config.clip, config.clip).mean()
        values = policy.critic(samples.observations).view(-1)
        errors = squared_error(values, samples.values, samples.returns, config.value_clip)
        value_loss = 0.5 * errors.mean()
        loss = policy_loss + config.value_coef * value_loss
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropies.mean()
        self.optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self._parameters, config.max_grad_norm, foreach=True)
        if grad_norm.isfinite():
            self.optimizer.step()
        if not needs_metrics:
            return grad_norm, {}
        with torch.no_grad():
            clip_mask = is_clipped(log_ratio, advantages, config.clip, config.clip)
            return grad_norm, {
                TrainMetric.LOSS: loss.detach(),
                TrainMetric.VALUE_LOSS: value_loss.detach(),
                TrainMetric.ENTROPY: entropies.detach().mean(),
                TrainMetric.POLICY_KL: kl(samples.logprobs, logprobs).mean(),
                TrainMetric.CLIP_RATIO: clip_mask.float().mean(),
            }


class RewardScaler:
    """A scaler that divides rewards by the standard deviation of the discounted returns so far.

    The formula is from `VecNormalize` of https://github.com/openai/baselines:
    R_t = gamma * R_t-1 + r_t, from 0 at the start of each episode.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._running_return: Tensor | None = None
        self._moments = RunningMoments(())

    def scale(self, rewards: Tensor, is_finished: Tensor) -> Tensor:
        """Add the rewards [T, N] to the statistics, and return the scaled rewards."""
        running_return = torch.zeros_like(rewards[0])
        if self._running_return is not None:
            running_return = self._running_return.to(rewards.device)
        returns = []
        for reward, is_end in zip(rewards, is_finished, strict=True):
            running_return = self._gamma * running_return + reward
            returns.append(running_return)
            running_return = torch.where(is_end, 0.0, running_return)
        self._running_return = running_return
        self._moments.update(torch.cat(returns).cpu())
        return rewards / (self._moments.variance + _STD_EPS).sqrt().float().item()

    def get_state(self) -> dict[str, Tensor]:
        """Return the complete state."""
        assert self._running_return is not None, "the scaler has not been used"
        return {"running": self._running_return, **self._moments.state_dict()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from the result of `get_state`."""
        moments = dict(state)
        self._running_return = moments.pop("running")
        self._moments.load_state_dict(moments)


def _compute_mean(step_metrics: Sequence[Mapping[str, Tensor]], name: str) -> float:
    return float(torch.stack([tensors[name] for tensors in step_metrics]).mean())

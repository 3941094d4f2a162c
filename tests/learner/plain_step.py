"""A reference implementation of a training step in plain torch, without packing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ludus.proto.config import ClipLoss, GrpoConfig, LearnerConfig, PpoConfig
from ludus.trainer.core.types import TrainingSample


class PlainPolicy(nn.Module):
    """A language model with an optional value head and the learner's parameter names."""

    def __init__(self, model_path: str, *, has_value_head: bool) -> None:
        super().__init__()
        self.language_model = AutoModelForCausalLM.from_pretrained(model_path)
        self.value_head = None
        if has_value_head:
            self.value_head = nn.Linear(self.language_model.config.hidden_size, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(self, sample: TrainingSample) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs and values of the sampled tokens, and the value after the last token."""
        token_ids = torch.tensor([list(sample.token_ids)])
        output = self.language_model(token_ids, output_hidden_states=True)
        sampled_positions = torch.tensor(np.flatnonzero(sample.loss_mask))
        logprobs = output.logits[0].log_softmax(-1)[
            sampled_positions - 1, token_ids[0, sampled_positions]
        ]
        values = torch.zeros(token_ids.shape[1])
        if self.value_head is not None:
            values = self.value_head(output.hidden_states[-1][0]).squeeze(-1)
        return logprobs, values[sampled_positions - 1], values[-1]


def take_plain_step(
    model_path: str,
    samples: Sequence[TrainingSample],
    algorithm: GrpoConfig | PpoConfig,
    config: LearnerConfig,
    learning_rate: float,
) -> dict[str, Tensor]:
    """Take one training step on `samples`, and return the new weights by parameter name."""
    policy = PlainPolicy(model_path, has_value_head=isinstance(algorithm, PpoConfig))
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    with torch.no_grad():
        start_outputs = [policy(sample) for sample in samples]
    advantages = [
        _compute_advantages(*arguments, algorithm)
        for arguments in zip(samples, start_outputs, strict=True)
    ]
    minibatches = np.array_split(np.arange(len(samples)), config.num_minibatches)
    for _ in range(config.update_epochs):
        for minibatch in minibatches:
            outputs = [policy(samples[row]) for row in minibatch]
            old_logprobs = torch.cat([start_outputs[row][0] for row in minibatch])
            old_values = torch.cat([start_outputs[row][1] for row in minibatch])
            targets = torch.cat([advantages[row] for row in minibatch])
            scaled_advantages = targets
            if isinstance(algorithm, PpoConfig):
                scaled_advantages = (targets - targets.mean()) / targets.std()
            loss = _compute_policy_loss(
                torch.cat([output[0] for output in outputs]),
                old_logprobs,
                scaled_advantages,
                algorithm,
            )
            if isinstance(algorithm, PpoConfig):
                errors = torch.cat([output[1] for output in outputs]) - (targets + old_values)
                loss = loss + algorithm.value_coef * 0.5 * errors.square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()
    return dict(policy.named_parameters())


def _compute_advantages(
    sample: TrainingSample,
    start_output: tuple[Tensor, Tensor, Tensor],
    algorithm: GrpoConfig | PpoConfig,
) -> Tensor:
    """Return the advantages of the sampled tokens, which for PPO are returns minus values."""
    mask = np.asarray(sample.loss_mask)
    if isinstance(algorithm, GrpoConfig):
        return torch.tensor(np.asarray(sample.advantages)[mask], dtype=torch.float32)
    _, values, last_value = start_output
    rewards = np.asarray(sample.rewards)[mask]
    bootstrap_value = 0.0 if sample.terminated else float(last_value)
    returns = rewards[::-1].cumsum()[::-1] + bootstrap_value
    return torch.tensor(returns.copy(), dtype=torch.float32) - values


def _compute_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, algorithm: GrpoConfig | PpoConfig
) -> Tensor:
    assert isinstance(algorithm.loss, ClipLoss)
    ratio = (logprobs - old_logprobs).exp()
    clipped_ratio = ratio.clamp(1 - algorithm.loss.clip_low, 1 + algorithm.loss.clip_high)
    return -torch.minimum(ratio * advantages, clipped_ratio * advantages).mean()

"""The modules that an optimizer step updates: the policy, and a critic with its own model.

    rows --policy--> log-probs, entropies, and values of a value head --+--> PolicyOutput
    rows --critic--> values instead of those --------------------------+

Policy and critic are sharded separately, and their gradients are clipped separately.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ludus.proto.config import AlgorithmConfig, PpoConfig
from ludus.trainer.learner.critic import Critic
from ludus.trainer.learner.micro_batches import PackedRows
from ludus.trainer.learner.model import (
    VALUE_HEAD,
    EntropyMode,
    PolicyModel,
    PolicyOutput,
    full_tensor,
)


class OptimizerGroup(NamedTuple):
    """Parameters with the same learning rate."""

    parameters: list[nn.Parameter]
    rate_scale: float
    """Factor for the scheduled learning rate."""


class ActorCritic(nn.Module):
    """A policy, optionally with a critic that has its own model."""

    def __init__(self, policy: PolicyModel, critic: Critic | None) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic

    def forward(
        self, rows: PackedRows, temperature: float, entropy_mode: EntropyMode = "none"
    ) -> PolicyOutput:
        """Return the policy's output for rows, with the critic's values."""
        output: PolicyOutput = self.policy(rows, temperature, entropy_mode)
        if self.critic is None:
            return output
        values = self.critic(rows)
        return output._replace(values=values.values, last_values=values.last_values)

    def models(self) -> list[PreTrainedModel]:
        """Return the policy's language model and, if it is separate, the critic's model."""
        critic = [] if self.critic is None else [self.critic.classifier]
        return [self.policy.language_model, *critic]

    @property
    def stateful(self) -> nn.Module:
        """The module whose state a checkpoint contains: without a critic, the policy alone."""
        return self.policy if self.critic is None else self

    def reshard(self) -> None:
        """Shard all parameters again.

        After a forward pass without a backward pass, FSDP keeps whole copies, which `parameters()`
        would then return.
        """
        for part in self._parts():
            if isinstance(part, FSDPModule):
                part.reshard()

    def sync_gradients(self, enabled: bool) -> None:
        """Set whether ranks share their gradients in the next backward pass."""
        for part in self._parts():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(enabled)

    def clip_gradients(self, max_norm: float) -> tuple[float, bool]:
        """Clip all gradients; return the policy's norm before clipping, and whether all are finite.

        The norms of policy and critic are clipped separately.
        """
        norms = []
        for part in self._parts():
            parameters = [p for p in part.parameters() if p.grad is not None]
            total: Tensor = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            norms.append(float(full_tensor(total)))
        return norms[0], all(map(math.isfinite, norms))

    def optimizer_groups(
        self, learning_rate: float, algorithm: AlgorithmConfig
    ) -> list[OptimizerGroup]:
        """Return the trainable parameters, with a separate group for a separate critic."""
        scale = _critic_scale(learning_rate, algorithm)
        critic_parameters: dict[str, nn.Parameter] = {}
        if self.critic is not None or scale != 1:
            critic_parameters = {
                name: parameter
                for name, parameter in self.named_parameters()
                if name.startswith(("critic.", f"policy.{VALUE_HEAD}."))
            }
        policy_parameters = [
            parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad and name not in critic_parameters
        ]
        groups = [OptimizerGroup(policy_parameters, 1.0)]
        if critic_parameters:
            groups.append(OptimizerGroup(list(critic_parameters.values()), scale))
        return groups

    def _parts(self) -> list[nn.Module]:
        return [part for part in (self.policy, self.critic) if part is not None]


def _critic_scale(learning_rate: float, algorithm: AlgorithmConfig) -> float:
    """Return the critic's learning rate, relative to the policy's."""
    rate = algorithm.critic.learning_rate if isinstance(algorithm, PpoConfig) else None
    return 1.0 if rate is None else rate / learning_rate

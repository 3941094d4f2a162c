"""What an optimizer step moves: the policy, and the critic where it is a model of its own.

    rows --policy--> log-probs, entropies, and values of its head --+--> PolicyOutput
    rows --critic--> values, in their place ------------------------+

Each is sharded, and its gradient clipped, by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ludus.proto.config import AlgorithmConfig, PpoConfig
from ludus.trainer.learner.critic import Critic
from ludus.trainer.learner.micro_batches import PackedRows
from ludus.trainer.learner.model import VALUE_HEAD, Entropy, Policy, PolicyOutput, full_tensor


class OptimizerGroup(NamedTuple):
    """Parameters that learn at one rate."""

    parameters: list[nn.Parameter]
    rate_scale: float
    """What the scheduled learning rate is multiplied with."""


class ActorCritic(nn.Module):
    """A policy, and a critic beside it or none."""

    def __init__(self, policy: Policy, critic: Critic | None) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic

    def forward(
        self, rows: PackedRows, temperature: float, wanted_entropy: Entropy = "none"
    ) -> PolicyOutput:
        """What the policy says of rows, with the critic's values."""
        output: PolicyOutput = self.policy(rows, temperature, wanted_entropy)
        if self.critic is None:
            return output
        said = self.critic(rows)
        return output._replace(values=said.values, last_values=said.last_values)

    def models(self) -> list[PreTrainedModel]:
        """The policy's model, and the critic's if that is another."""
        critic = [] if self.critic is None else [self.critic.classifier]
        return [self.policy.language_model, *critic]

    @property
    def stateful(self) -> nn.Module:
        """The module whose state a checkpoint holds: without a critic it is the policy alone."""
        return self.policy if self.critic is None else self

    def reshard(self) -> None:
        """Shard all parameters again.

        After a forward pass that no backward pass follows, FSDP holds whole copies, which would
        be taken for the parameters.
        """
        for part in self._parts():
            if isinstance(part, FSDPModule):
                part.reshard()

    def sync_gradients(self, is_wanted: bool) -> None:
        """Whether ranks share their gradients in the next backward pass."""
        for part in self._parts():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(is_wanted)

    def clip_gradients(self, max_norm: float) -> tuple[float, bool]:
        """The norm of the policy's gradient before it is clipped, and whether all are finite."""
        norms = []
        for part in self._parts():
            parameters = [p for p in part.parameters() if p.grad is not None]
            total: Tensor = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            norms.append(float(full_tensor(total)))
        return norms[0], all(map(math.isfinite, norms))

    def optimizer_groups(
        self, learning_rate: float, algorithm: AlgorithmConfig
    ) -> list[OptimizerGroup]:
        """The parameters that learn, those of the critic apart where it learns at its own rate."""
        scale = _critic_scale(learning_rate, algorithm)
        of_critic = dict(self._critic_parameters())
        if self.critic is None and scale == 1:
            of_critic = {}
        rest = [
            parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad and name not in of_critic
        ]
        groups = [OptimizerGroup(rest, 1.0)]
        if of_critic:
            groups.append(OptimizerGroup(list(of_critic.values()), scale))
        return groups

    def _critic_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.named_parameters():
            if name.startswith(("critic.", f"policy.{VALUE_HEAD}.")):
                yield name, parameter

    def _parts(self) -> list[nn.Module]:
        return [part for part in (self.policy, self.critic) if part is not None]


def _critic_scale(learning_rate: float, algorithm: AlgorithmConfig) -> float:
    """The critic's learning rate, relative to the policy's."""
    rate = algorithm.critic.learning_rate if isinstance(algorithm, PpoConfig) else None
    return 1.0 if rate is None else rate / learning_rate

"""The policy as a torch module: token log-probs in, sharded over the learner's ranks."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from ludus.proto.config import LearnerConfig
from ludus.trainer.algorithms.logits import entropy, token_logprobs


class Policy(nn.Module):
    """A causal language model that answers with log-probs of given tokens.

    Shapes: U = sequences, T = tokens, V = vocabulary.
    """

    def __init__(self, language_model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.language_model = language_model
        self.temperature = temperature

    def forward(self, token_ids: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [U, T] of the sampled tokens and entropies [U, T] where they were sampled.

        Other positions are 0. Padding stands right of a sequence, where causal attention
        never looks back from, so no attention mask is needed.

        Args:
            token_ids: int64 [U, T], padded on the right.
            sampled: bool [U, T]; the first token of a sequence cannot be sampled.
        """
        # Logits are the largest tensor by far: only columns where some row sampled are made.
        columns = sampled.any(dim=0).nonzero()[:, 0]
        if len(columns) == 0:  # an empty piece still takes part in the ranks' collectives
            columns = torch.ones(1, dtype=torch.int64, device=sampled.device)
        logits = self.language_model(
            input_ids=token_ids, logits_to_keep=columns - 1, use_cache=False
        ).logits
        logprobs = token_logprobs(logits, token_ids[:, columns], self.temperature)
        entropies = entropy(logits.float() / self.temperature)
        return _spread(logprobs, columns, sampled), _spread(entropies, columns, sampled)

    def full_names(self) -> dict[str, str]:
        """The Hugging Face name of each parameter of this module."""
        return {
            name: name.removeprefix("language_model.").replace(_CHECKPOINT_PREFIX, "")
            for name, _ in self.named_parameters()
        }


class ShardedPolicy(FSDPModule, Policy):
    """The type that FSDP2 gives a policy."""


def shard(policy: Policy, config: LearnerConfig, mesh: DeviceMesh) -> ShardedPolicy:
    """The policy with its parameters sharded over `mesh` by FSDP2, layer by layer."""
    mixed = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None,
        reduce_dtype=torch.float32,
    )
    for name, module in list(policy.named_modules()):
        if not isinstance(module, nn.ModuleList) or not name.endswith("layers"):
            continue
        for index, layer in enumerate(module):
            if config.activation_checkpointing:
                module[index] = layer = checkpoint_wrapper(layer)
            fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(policy, mesh=mesh, mp_policy=mixed)
    return cast(ShardedPolicy, policy)


def _spread(values: Tensor, columns: Tensor, sampled: Tensor) -> Tensor:
    """`values` [U, len(columns)] put into their columns of [U, T]; 0 where nothing was sampled."""
    full = values.new_zeros(sampled.shape).index_copy(1, columns, values)
    return torch.where(sampled, full, 0.0)

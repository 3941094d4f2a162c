"""The modules that an optimizer step updates: the policy, and a critic with its own model.

    rows --policy--> log-probs, entropies, and values of a value head --+--> PolicyOutput
    rows --critic--> values from a separate critic --------------------+

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
from ludus.proto.errors import ConfigError
from ludus.trainer.learner.micro_batches import PackedRows
from ludus.trainer.learner.model import (
    VALUE_HEAD,
    EntropyMode,
    PolicyModel,
    PolicyOutput,
    gather_full_tensor,
)
from ludus.trainer.learner.tree_attention import make_tree_mask, use_tree_attention
from ludus.trainer.models.load import is_reward_model, load_sequence_classifier, load_tokenizer
from ludus.trainer.models.sharded_reading import Prepare


class Critic(nn.Module):
    """A single-label sequence classifier, evaluated at several positions of each sequence."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier
        use_tree_attention(classifier)

    def forward(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Return float32 values: [E] before each sampled token, and [N] after each sample."""
        hidden_states = self.classifier.base_model(
            input_ids=rows.token_ids,
            attention_mask=(
                None if rows.ends is None else make_tree_mask(self.classifier, rows.ends)
            ),
            position_ids=None if rows.ends is None else rows.depths,
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)
        positions = torch.cat([rows.positions, rows.last_positions])
        output = self.classifier.score(hidden_states.index_select(0, positions)).float().squeeze(-1)
        values = output[: len(rows.positions)].index_select(0, rows.position_of_target)
        return values, output[len(rows.positions) :]


class OptimizerGroup(NamedTuple):
    """Parameters with the same learning rate."""

    parameters: list[nn.Parameter]
    rate_scale: float
    """Factor by which the scheduled learning rate is multiplied."""


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
        values, last_values = self.critic(rows)
        return output._replace(values=values, last_values=last_values)

    def list_models(self) -> list[PreTrainedModel]:
        """Return the policy's language model and, if it is separate, the critic's model."""
        critic_models = [] if self.critic is None else [self.critic.classifier]
        return [self.policy.language_model, *critic_models]

    def count_trained(self) -> int:
        """Return the number of trained parameters, of all ranks together."""
        return sum(weight.numel() for weight in self.parameters() if weight.requires_grad)

    @property
    def checkpoint_module(self) -> nn.Module:
        """The module whose state a checkpoint contains; without a separate critic, the policy."""
        return self.policy if self.critic is None else self

    def reshard(self) -> None:
        """Shard all parameters again.

        After a forward pass without a backward pass, FSDP keeps whole copies, which `parameters()`
        would then return.
        """
        for module in self._list_modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def sync_gradients(self, is_enabled: bool) -> None:
        """Set whether ranks add up their gradients in the next backward pass."""
        for module in self._list_modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(is_enabled)

    def clip_gradients(self, max_norm: float) -> tuple[float, bool]:
        """Clip all gradients; return the policy's norm before clipping, and whether all are finite.

        The gradients of policy and critic are clipped separately.
        """
        norms = []
        for module in self._list_modules():
            weights = [weight for weight in module.parameters() if weight.grad is not None]
            norm: Tensor = torch.nn.utils.clip_grad_norm_(weights, max_norm)
            norms.append(float(gather_full_tensor(norm)))
        return norms[0], all(map(math.isfinite, norms))

    def make_optimizer_groups(
        self, learning_rate: float, algorithm: AlgorithmConfig
    ) -> list[OptimizerGroup]:
        """Return the trainable parameters, with a separate group for a separate critic."""
        critic_rate = algorithm.critic.learning_rate if isinstance(algorithm, PpoConfig) else None
        rate_scale = 1.0 if critic_rate is None else critic_rate / learning_rate
        has_critic_group = self.critic is not None or critic_rate is not None
        policy_group, critic_group = OptimizerGroup([], 1.0), OptimizerGroup([], rate_scale)
        for name, parameter in self.named_parameters():
            if has_critic_group and name.startswith(("critic.", f"policy.{VALUE_HEAD}.")):
                critic_group.parameters.append(parameter)
            elif parameter.requires_grad:
                policy_group.parameters.append(parameter)
        return [policy_group, critic_group] if critic_group.parameters else [policy_group]

    def _list_modules(self) -> list[nn.Module]:
        return [module for module in (self.policy, self.critic) if module is not None]


def load_critic_model(
    path: str, policy_path: str, prepare: Prepare | None = None
) -> PreTrainedModel:
    """Load a critic's model from a folder or a Hugging Face id, or start from a language model.

    A reward model, or the critic of an earlier run, keeps its head. A causal language model gets a
    head that predicts 0, so that an untrained critic does not move the policy at first. `prepare`
    shards the model before its weights are read (see `load_prepared`).

    Raises:
        NotFoundError: there is no model.
        ConfigError: the vocabulary differs from the policy's.
    """
    keeps_head = is_reward_model(path)
    if path != policy_path:
        check_same_tokens(path, policy_path)

    def prepare_with_head(classifier: PreTrainedModel) -> None:
        if not keeps_head:
            classifier.score.weight = nn.Parameter(torch.zeros(classifier.score.weight.shape))
        if prepare is not None:
            prepare(classifier)

    classifier = load_sequence_classifier(
        path, torch.float32, allows_new_head=True, prepare=prepare_with_head
    )
    # The loaded config still names the original class; replace it with the actual one.
    classifier.config.architectures = [type(classifier).__name__]
    return classifier


def check_same_tokens(path: str, policy_path: str) -> None:
    """Check that every token of the policy has the same id in the critic's vocabulary.

    Raises:
        ConfigError: a token has a different id.
    """
    critic_ids = load_tokenizer(path).get_vocab()
    for token, token_id in load_tokenizer(policy_path).get_vocab().items():
        if critic_ids.get(token) != token_id:
            raise ConfigError(
                f"algorithm.critic.path = '{path}' must have the vocabulary of the policy, "
                f"'{policy_path}', but token {token!r} has id {critic_ids.get(token)} instead of "
                f"{token_id}; use a critic of the same model family, or remove path to start from "
                "a copy of the policy"
            )

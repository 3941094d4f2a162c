"""A critic with its own model: a separate trunk, with a head that predicts returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ludus.proto.errors import ConfigError
from ludus.trainer.learner.micro_batches import PackedRows
from ludus.trainer.learner.model import ancestor_mask
from ludus.trainer.models.load import is_reward_model, load_sequence_classifier, load_tokenizer


class CriticOutput(NamedTuple):
    """Outputs of a critic for packed rows. A tuple, so that FSDP finds the tensors in it.

    Shapes: E = distinct sampled tokens, N = samples.
    """

    values: Tensor
    """float32 [E] of the state before each sampled token."""
    last_values: Tensor
    """float32 [N] of the state after each sample's last token."""


class Critic(nn.Module):
    """A single-label sequence classifier, evaluated at several positions of each sequence."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, rows: PackedRows) -> CriticOutput:
        """Return the values of the sampled tokens in `rows`."""
        hidden_states = self.classifier.base_model(
            input_ids=rows.token_ids,
            attention_mask=None if rows.ends is None else ancestor_mask(rows.ends),
            position_ids=None if rows.ends is None else rows.depths,
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)
        positions = torch.cat([rows.positions, rows.last_positions])
        output = self.classifier.score(hidden_states.index_select(0, positions)).float().squeeze(-1)
        values = output[: len(rows.positions)].index_select(0, rows.position_of_target)
        return CriticOutput(values, output[len(rows.positions) :])


def load_critic(path: str, policy_path: str) -> Critic:
    """Load a critic from a folder or a Hugging Face id, or initialize one from a language model.

    A reward model, or the critic of an earlier run, keeps its head. A causal language model gets a
    head that predicts 0, so that an untrained critic does not move the policy at first.

    Raises:
        NotFoundError: there is no model.
        ConfigError: the vocabulary differs from the policy's.
    """
    keeps_head = is_reward_model(path)
    if path != policy_path:
        check_same_tokens(path, policy_path)
    classifier = load_sequence_classifier(path, torch.float32, new_head=True)
    if not keeps_head:
        nn.init.zeros_(classifier.score.weight)
    # The loaded config still names the original class; replace it with the actual one.
    classifier.config.architectures = [type(classifier).__name__]
    return Critic(classifier)


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

"""A critic of its own: a trunk beside the policy's, with a head that predicts returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ludus.proto.errors import ConfigError
from ludus.trainer.learner.micro_batches import PackedRows
from ludus.trainer.learner.model import ancestors
from ludus.trainer.models.load import is_reward_model, load_sequence_classifier, load_tokenizer


class CriticOutput(NamedTuple):
    """What a critic says of rows. A tuple, so that FSDP finds the tensors in it.

    Shapes: E = sampled tokens that differ, N = samples.
    """

    values: Tensor
    """float32 [E] before each sampled token."""
    last_values: Tensor
    """float32 [N] after each sample's last token."""


class Critic(nn.Module):
    """A sequence classifier of one label that is asked at many places of a sequence."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, rows: PackedRows) -> CriticOutput:
        """Values of what was sampled in `rows`."""
        hidden = self.classifier.base_model(
            input_ids=rows.token_ids,
            attention_mask=None if rows.ends is None else ancestors(rows.ends),
            position_ids=None if rows.ends is None else rows.depths,
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)
        positions = torch.cat([rows.positions, rows.last_positions])
        output = self.classifier.score(hidden.index_select(0, positions)).float().squeeze(-1)
        before = output[: len(rows.positions)].index_select(0, rows.position_of_target)
        return CriticOutput(before, output[len(rows.positions) :])


def load_critic(path: str, policy_path: str) -> Critic:
    """The critic that a folder or a Hugging Face id holds, or begins.

    A reward model, or a critic that a run has left, keeps its head. A causal language model gets
    one that says 0: a critic that knows nothing does not move the policy at first.

    Raises:
        NotFoundError: there is no model.
        ConfigError: it has other tokens than the policy.
    """
    keeps_head = is_reward_model(path)
    if path != policy_path:
        check_same_tokens(path, policy_path)
    classifier = load_sequence_classifier(path, torch.float32, begins=True)
    if not keeps_head:
        nn.init.zeros_(classifier.score.weight)
    # Of what was loaded as another class, the configuration still names that one.
    classifier.config.architectures = [type(classifier).__name__]
    return Critic(classifier)


def check_same_tokens(path: str, policy_path: str) -> None:
    """Check that a critic reads what the policy writes: every token has the same number.

    Raises:
        ConfigError: one has not.
    """
    theirs = load_tokenizer(path).get_vocab()
    for token, number in load_tokenizer(policy_path).get_vocab().items():
        if theirs.get(token) != number:
            raise ConfigError(
                f"algorithm.critic.path = '{path}': expected the tokens of the policy, "
                f"'{policy_path}', got another number for {token!r} ({theirs.get(token)}, not "
                f"{number}); take a critic of the same model, or leave path out to begin as a copy "
                "of the policy"
            )

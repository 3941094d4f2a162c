"""Language models as actor and critic, which map token sequences to next-token logits or values.

Gymformer pads states of different lengths without correcting the positions of their tokens, so the
output for a state depends on the length of the other states. Here padding on either side is masked,
and every token has the position that it has without padding.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.arguments import (
    check_count,
    rename_setting_in_errors,
    require_path,
)
from ludus.trainer.learner.actor_critic import load_critic
from ludus.trainer.models.load import load_language_model

if TYPE_CHECKING:
    from ludus.trainer.compat.gymformer.trainer.request import AgentRequest, EpisodeReturns

_ARGUMENTS = {"model.path": "model_name", "path": "model_name"}


class LMActorNetwork(nn.Module):
    """A causal language model that returns logits of the next token.

    Args:
        model_name: Hugging Face id, or a folder that `save_pretrained` wrote.
        pad_token_id: token that is padding at both ends of a sequence if there is no mask. None
            if the tokenizer has no such token.

    Raises:
        NotFoundError: the model does not exist.
    """

    def __init__(self, model_name: str, pad_token_id: int | None) -> None:
        super().__init__()
        self.model_name = require_path("model_name", model_name)
        self.pad_token_id = _check_pad_token(pad_token_id)
        with rename_setting_in_errors(_ARGUMENTS):
            self.model = load_language_model(self.model_name)

    def forward(self, state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits [V] of `state` [T], or [N, V] of [N, T], padded on either side.

        Args:
            state: token ids of any numeric type.
            attention_mask: [T] or [N, T], true for tokens of the sequence, false for padding.
        """
        tokens = _TokenRows.make(state, attention_mask, self.pad_token_id)
        body = _base_model(self.model)
        hidden = tokens.select_last(_hidden_states(body, tokens))
        logits: Tensor = self.model.get_output_embeddings()(hidden).float()
        return logits if state.dim() > 1 else logits[0]

    def train_as_agent(self, request: AgentRequest) -> EpisodeReturns:
        """Train this model in place and return the returns of its episodes."""
        # The import takes seconds, and only training needs it.
        from ludus.trainer.compat.gymformer.trainer.language_model import train_language_model

        return train_language_model(request)


class LMCriticNetwork(nn.Module):
    """A language model with a scalar head, which returns the value of a token sequence.

    The arguments are those of `LMActorNetwork`. Initially all values are 0, unless the model is a
    reward model, whose head is kept.
    """

    def __init__(self, model_name: str, pad_token_id: int | None) -> None:
        super().__init__()
        self.model_name = require_path("model_name", model_name)
        self.pad_token_id = _check_pad_token(pad_token_id)
        with rename_setting_in_errors(_ARGUMENTS):
            self.model = load_critic(self.model_name, self.model_name).classifier

    def forward(self, state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return values [1] of `state` [T], or [N, 1] of states [N, T], padded on either side."""
        tokens = _TokenRows.make(state, attention_mask, self.pad_token_id)
        hidden = tokens.select_last(_hidden_states(_base_model(self.model), tokens))
        values: Tensor = self.model.score(hidden).float()
        return values if state.dim() > 1 else values[0]


class _TokenRows:
    """Rows of tokens [N, T] with a mask that is false for padding."""

    def __init__(self, token_ids: Tensor, mask: Tensor) -> None:
        self.token_ids = token_ids
        self.mask = mask
        self.positions = (mask.long().cumsum(-1) - 1).clamp(min=0)

    @classmethod
    def make(cls, state: Tensor, mask: Tensor | None, pad_token_id: int | None) -> _TokenRows:
        """Build rows from `state` [T] or [N, T].

        Without a mask, the pad tokens at both ends of a row are padding.
        """
        if not state.shape[-1]:
            raise ConfigError("state must contain at least one token; start with a prompt")
        token_ids = torch.atleast_2d(state).long()
        if mask is not None:
            return cls(token_ids, torch.atleast_2d(mask).bool())
        is_real = token_ids >= 0 if pad_token_id is None else token_ids != pad_token_id
        # A pad token between two other tokens belongs to the sequence.
        is_after_start = is_real.long().cumsum(-1) > 0
        is_before_end = is_real.flip(-1).long().cumsum(-1).flip(-1) > 0
        in_sequence = is_after_start & is_before_end
        # A row of pad tokens only keeps its last token.
        in_sequence[:, -1] |= ~in_sequence.any(-1)
        return cls(token_ids, in_sequence)

    def select_last(self, hidden: Tensor) -> Tensor:
        """Return the hidden state of each row's last token, [N, width]."""
        positions = torch.arange(self.mask.shape[1], device=self.mask.device)
        last = torch.where(self.mask, positions, 0).amax(-1)
        return hidden[torch.arange(len(last), device=last.device), last]


def _check_pad_token(pad_token_id: Any) -> int | None:
    if pad_token_id is not None:
        check_count("pad_token_id", pad_token_id, min_value=0)
    return None if pad_token_id is None else int(pad_token_id)


def _base_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a language model without its head."""
    body: PreTrainedModel = model.base_model
    return body


def _hidden_states(body: PreTrainedModel, tokens: _TokenRows) -> Tensor:
    """Return the last hidden states, [N, T, width]; those of padding are meaningless."""
    arguments: dict[str, Any] = {}
    # Some model families compute positions from the mask.
    if "position_ids" in inspect.signature(body.forward).parameters:
        arguments["position_ids"] = tokens.positions
    output = body(
        input_ids=tokens.token_ids, attention_mask=tokens.mask.long(), use_cache=False, **arguments
    )
    hidden: Tensor = output.last_hidden_state
    return hidden

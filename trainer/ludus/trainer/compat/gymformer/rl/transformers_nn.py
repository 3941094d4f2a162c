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

from ludus.proto.config.section import NonNegativeInt
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.checks import PathText, check_value, rename_in_errors
from ludus.trainer.learner.actor_critic import load_critic_model
from ludus.trainer.models.load import load_language_model

if TYPE_CHECKING:
    from ludus.trainer.compat.gymformer.trainer.request import AgentRequest, EpisodeReturns


class _LanguageModelNetwork(nn.Module):
    """A language model that maps token sequences to one output per sequence."""

    model: PreTrainedModel

    def __init__(self, model_name: str, pad_token_id: int | None) -> None:
        super().__init__()
        self.model_name: str = check_value("model_name", PathText, model_name)
        pad_token_id = check_value("pad_token_id", NonNegativeInt | None, pad_token_id)
        self.pad_token_id: int | None = pad_token_id
        with rename_in_errors({"model.path": "model_name", "path": "model_name"}):
            self.model = self._load_model(self.model_name)

    def forward(self, state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the output of `state` [T], or of states [N, T], padded on either side.

        Args:
            state: token ids of any numeric type.
            attention_mask: [T] or [N, T], true for tokens of the sequence, false for padding.
        """
        if not state.shape[-1]:
            raise ConfigError("state must contain at least one token; start with a prompt")
        token_ids = torch.atleast_2d(state).long()
        if attention_mask is None:
            mask = _find_sequences(token_ids, self.pad_token_id)
        else:
            mask = torch.atleast_2d(attention_mask).bool()
        outputs = self._apply_head(_compute_last_states(self.model.base_model, token_ids, mask))
        return outputs.float() if state.dim() > 1 else outputs.float()[0]

    def _load_model(self, path: str) -> PreTrainedModel:
        raise NotImplementedError

    def _apply_head(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class LMActorNetwork(_LanguageModelNetwork):
    """A causal language model that returns logits [V] or [N, V] of the next token.

    Args:
        model_name: Hugging Face id, or a folder that `save_pretrained` wrote.
        pad_token_id: token that counts as padding at both ends of a sequence without a mask. None
            if the tokenizer has no such token.

    Raises:
        NotFoundError: the model does not exist.
    """

    def train_as_agent(self, request: AgentRequest) -> EpisodeReturns:
        """Train this model in place and return the returns of its episodes."""
        # The import takes seconds, and only training needs it.
        from ludus.trainer.compat.gymformer.trainer.language_model import train_language_model

        return train_language_model(request)

    def _load_model(self, path: str) -> PreTrainedModel:
        return load_language_model(path)

    def _apply_head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits


class LMCriticNetwork(_LanguageModelNetwork):
    """A language model with a scalar head, which returns values [1] or [N, 1].

    The arguments are those of `LMActorNetwork`. Initially all values are 0, unless the model is a
    reward model, whose head is kept.
    """

    def _load_model(self, path: str) -> PreTrainedModel:
        return load_critic_model(path, path)

    def _apply_head(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.model.score(hidden)
        return values


def _find_sequences(token_ids: Tensor, pad_token_id: int | None) -> Tensor:
    """Return a mask [N, T] that is false for the pad tokens at both ends of each row."""
    is_real = token_ids >= 0 if pad_token_id is None else token_ids != pad_token_id
    # A pad token between two other tokens belongs to the sequence.
    is_after_start = is_real.long().cumsum(-1) > 0
    is_before_end = is_real.flip(-1).long().cumsum(-1).flip(-1) > 0
    mask = is_after_start & is_before_end
    # A row that contains only pad tokens keeps its last token.
    mask[:, -1] |= ~mask.any(-1)
    return mask


def _compute_last_states(backbone: PreTrainedModel, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Return the hidden state of each row's last token, [N, width]."""
    arguments: dict[str, Any] = {}
    # Some model families compute positions from the mask.
    if "position_ids" in inspect.signature(backbone.forward).parameters:
        arguments["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    output = backbone(token_ids, attention_mask=mask.long(), use_cache=False, **arguments)
    rows, columns = (torch.arange(size, device=mask.device) for size in mask.shape)
    hidden: Tensor = output.last_hidden_state[rows, torch.where(mask, columns, 0).amax(-1)]
    return hidden

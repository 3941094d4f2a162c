"""Language models as actor and critic: token sequences in, logits of the next token or values out.

Gymformer pads states of different lengths and leaves the positions of the tokens as they then
stand, so the same state says something else beside a longer one. Here padding on either side is
masked, and every token has the position that it has alone.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.arguments import check_count, path_in, told_as
from ludus.trainer.learner.critic import load_critic
from ludus.trainer.models.load import load_language_model

if TYPE_CHECKING:
    from ludus.trainer.compat.gymformer.trainer.request import AgentRequest, EpisodeReturns

_NAMES = {"model.path": "model_name", "path": "model_name"}


class LMActorNetwork(nn.Module):
    """A causal language model: logits of the next token of a sequence.

    Args:
        model_name: Hugging Face id, or a folder that `save_pretrained` wrote.
        pad_token_id: at the ends of a sequence it is padding, unless a mask says otherwise; None,
            as of tokenizers that have none, pads nothing.

    Raises:
        NotFoundError: there is no such model.
    """

    def __init__(self, model_name: str, pad_token_id: int | None) -> None:
        super().__init__()
        self.model_name = path_in("model_name", model_name)
        self.pad_token_id = _padding(pad_token_id)
        with told_as(_NAMES):
            self.model = load_language_model(self.model_name)

    def forward(self, state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [V] of `state` [T], or [N, V] of states [N, T] that are padded on either side.

        Args:
            state: token ids, also as numbers of another type.
            attention_mask: [T] or [N, T], true where a token is one of the sequence.
        """
        tokens = _Tokens.of(state, attention_mask, self.pad_token_id)
        body = _body_of(self.model)
        hidden = tokens.last_of(_hidden_states(body, tokens))
        logits: Tensor = self.model.get_output_embeddings()(hidden).float()
        return logits if state.dim() > 1 else logits[0]

    def train_as_agent(self, request: AgentRequest) -> EpisodeReturns:
        """The returns of the episodes on which this model was trained, in place."""
        # What trains language models starts processes, and takes seconds to import.
        from ludus.trainer.compat.gymformer.trainer.language_model import train_language_model

        return train_language_model(request)


class LMCriticNetwork(nn.Module):
    """The value of a token sequence, from a language model with a head of one number.

    The arguments are those of `LMActorNetwork`. At first all values are 0, unless the model is a
    reward model, whose head is kept.
    """

    def __init__(self, model_name: str, pad_token_id: int | None) -> None:
        super().__init__()
        self.model_name = path_in("model_name", model_name)
        self.pad_token_id = _padding(pad_token_id)
        with told_as(_NAMES):
            self.model = load_critic(self.model_name, self.model_name).classifier

    def forward(self, state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Values [1] of `state` [T], or [N, 1] of states [N, T] that are padded on either side."""
        tokens = _Tokens.of(state, attention_mask, self.pad_token_id)
        hidden = tokens.last_of(_hidden_states(_body_of(self.model), tokens))
        values: Tensor = self.model.score(hidden).float()
        return values if state.dim() > 1 else values[0]


class _Tokens:
    """Rows of tokens [N, T], which of them belong to the sequence, and where it ends."""

    def __init__(self, token_ids: Tensor, mask: Tensor) -> None:
        self.token_ids = token_ids
        self.mask = mask
        self.positions = (mask.long().cumsum(-1) - 1).clamp(min=0)

    @classmethod
    def of(cls, state: Tensor, mask: Tensor | None, pad_token_id: int | None) -> _Tokens:
        """The rows of `state` [T] or [N, T]; without a mask, padding is what it ends with."""
        if not state.shape[-1]:
            raise ConfigError("state expected at least one token, got none; begin with a prompt")
        token_ids = torch.atleast_2d(state).long()
        if mask is not None:
            return cls(token_ids, torch.atleast_2d(mask).bool())
        real = token_ids >= 0 if pad_token_id is None else token_ids != pad_token_id
        # Between two tokens that are none, it is a token like any other.
        has_before = real.long().cumsum(-1) > 0
        has_after = real.flip(-1).long().cumsum(-1).flip(-1) > 0
        inside = has_before & has_after
        # Of a sequence that is nothing else, the last one stays.
        inside[:, -1] |= ~inside.any(-1)
        return cls(token_ids, inside)

    def last_of(self, hidden: Tensor) -> Tensor:
        """[N, width] the hidden state of each row's last token."""
        places = torch.arange(self.mask.shape[1], device=self.mask.device)
        last = torch.where(self.mask, places, 0).amax(-1)
        return hidden[torch.arange(len(last), device=last.device), last]


def _padding(pad_token_id: Any) -> int | None:
    if pad_token_id is not None:
        check_count("pad_token_id", pad_token_id, least=0)
    return None if pad_token_id is None else int(pad_token_id)


def _body_of(model: PreTrainedModel) -> PreTrainedModel:
    """What a causal language model has below its head."""
    body: PreTrainedModel = model.base_model
    return body


def _hidden_states(body: PreTrainedModel, tokens: _Tokens) -> Tensor:
    """[N, T, width] the last hidden states; on padding they mean nothing."""
    arguments: dict[str, Any] = {}
    # Some families make positions of the mask by themselves.
    if "position_ids" in inspect.signature(body.forward).parameters:
        arguments["position_ids"] = tokens.positions
    output = body(
        input_ids=tokens.token_ids, attention_mask=tokens.mask.long(), use_cache=False, **arguments
    )
    hidden: Tensor = output.last_hidden_state
    return hidden

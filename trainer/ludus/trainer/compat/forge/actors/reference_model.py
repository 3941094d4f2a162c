"""Forge's ReferenceModel: the policy before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ludus.trainer.compat.forge.actor_support import make_actor_settings, mask_left_padding
from ludus.trainer.compat.forge.controller.actor import ForgeActor, endpoint
from ludus.trainer.compat.forge.grpo import compute_logprobs
from ludus.trainer.models.load import load_language_model, load_tokenizer


@dataclass
class ReferenceModel(ForgeActor):
    """The reference model, which computes log-probs of responses.

    The fields are sections of Forge's `ref_model`.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    compile: Mapping[str, Any] = field(default_factory=dict)
    parallelism: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)

    def setup(self) -> None:
        """Load the model."""
        _, model_path = make_actor_settings("ref_model", vars(self), max_tokens=None)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = load_language_model(model_path).to(device).eval()
        self._pad_id = load_tokenizer(model_path).pad_token_id

    @endpoint
    def forward(
        self, input_ids: Tensor, max_req_tokens: int, return_logprobs: bool = True
    ) -> Tensor:
        """Return the log-probs [B, R] of the responses in `input_ids` [B, S], or all logits.

        Args:
            max_req_tokens: S - R, the padded length of the requests. Requests are padded on the
                left, responses on the right.
            return_logprobs: False returns the logits [B, S, V].
        """
        input_ids = input_ids.to(self._model.device)
        mask, position_ids = mask_left_padding(input_ids, self._pad_id)
        with torch.inference_mode():
            logits = self._model(
                input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False
            ).logits
        if not return_logprobs:
            return logits.cpu()
        return compute_logprobs(logits, input_ids[:, max_req_tokens:]).cpu()

"""Attention functions of Ludus in models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask


def register_attention(name: str, attend: Callable[..., tuple[Tensor, Any]]) -> None:
    """Add an attention function, which gets the masks of torch's function."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Let the model use this attention, if it uses transformers' attention on torch's function."""
    if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        model.set_attn_implementation(name)

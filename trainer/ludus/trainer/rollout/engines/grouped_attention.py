"""Attention of single tokens to padded keys, without copies of keys that several heads share.

If a mask is given, transformers copies the keys and values for each of the heads that share them.
For a single token, the heads can take the place of the tokens, so that nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ludus.trainer.models.attention import register_attention, set_attention

_NAME = "ludus_grouped"


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let the model use this attention, if it uses transformers' attention on torch's function."""
    set_attention(model, _NAME)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Return [rows, tokens, heads, head size], as transformers' attention functions do."""
    num_rows, num_heads, num_tokens, _ = query.shape
    num_key_heads = key.shape[1]
    is_shared = num_tokens == 1 and num_heads > num_key_heads
    has_plain_mask = attention_mask is not None and attention_mask.shape[1] == 1
    if not (is_shared and has_plain_mask) or arguments.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **arguments
        )
    grouped_query = query.reshape(num_rows, num_key_heads, num_heads // num_key_heads, -1)
    output = scaled_dot_product_attention(
        grouped_query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(num_rows, 1, num_heads, -1), None


register_attention(_NAME, _attend)

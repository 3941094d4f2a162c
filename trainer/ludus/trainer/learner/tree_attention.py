"""Attention of packed prefix trees, in memory that is linear in the length of a row.

    ends [R, L] --as a "mask" [R, 1, 1, L]--> transformers --unchanged--> each attention layer,
    which computes blocks of queries, and computes them again in the backward pass

The node at q may attend to the node at k exactly if k <= q < end[k] (see `packing`). So each block
builds its part of the mask from the ends, and needs only the keys up to its last query, from the
first key that one of its queries may attend to. Models that do not use transformers' attention
interface get a dense mask.

Shapes: R = rows, L = tokens of a row, B = queries of a block, K = keys of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from ludus.trainer.models.attention import register_attention, set_attention

QUERY_BLOCK_SIZE = 512
"""Number of queries of a block."""
_NAME = "ludus_tree"


def use_tree_attention(model: PreTrainedModel) -> None:
    """Let the model use this attention, if it uses transformers' attention on torch's function."""
    set_attention(model, _NAME)


def make_tree_mask(model: PreTrainedModel, ends: Tensor) -> Tensor:
    """Return the attention mask for the model: the ends [R, 1, 1, L], or else a dense mask."""
    if model.config._attn_implementation == _NAME:
        return ends[:, None, None]
    return make_ancestor_mask(ends)


def make_ancestor_mask(ends: Tensor) -> Tensor:
    """Return a bool mask [R, 1, L, L], True if the column's node is an ancestor of the row's."""
    return _make_block_mask(ends, 0, 0, ends.shape[1])


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
    if attention_mask is None or attention_mask.dtype != torch.int64:  # no ends
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **arguments
        )
    ends = attention_mask[:, 0, 0]
    num_groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, num_groups), repeat_kv(value, num_groups)
    return _attend_in_blocks(query, key, value, ends, dropout, scaling), None


@torch.compiler.disable
def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """Return the output [R, L, heads, head size]; the masks of several blocks are not kept."""
    length = query.shape[2]
    max_ends, outputs = ends.amax(0), []
    for start in range(0, length, QUERY_BLOCK_SIZE):
        stop = min(start + QUERY_BLOCK_SIZE, length)
        first_key = int((max_ends[:stop] > start).int().argmax())
        inputs = (
            query[:, :, start:stop],
            key[:, :, first_key:stop],
            value[:, :, first_key:stop],
            ends[:, first_key:stop],
            start - first_key,
            first_key,
            dropout,
            scaling,
        )
        if length <= QUERY_BLOCK_SIZE:
            outputs.append(_attend_block(*inputs))
            continue
        output = checkpoint(
            _attend_block, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0
        )
        assert isinstance(output, Tensor)
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    offset: int,
    first_key: int,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    mask = _make_block_mask(ends, first_key, offset, query.shape[2])
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )


def _make_block_mask(ends: Tensor, first_key: int, offset: int, num_queries: int) -> Tensor:
    """Return the mask [R, 1, B, K] of queries that start `offset` columns after the first key."""
    keys = torch.arange(first_key, first_key + ends.shape[1], device=ends.device)
    queries = keys[offset : offset + num_queries, None]
    return ((keys <= queries) & (queries < ends[:, None, :]))[:, None]


register_attention(_NAME, _attend)

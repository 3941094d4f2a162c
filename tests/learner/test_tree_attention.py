"""Attention in blocks computes the same as a dense mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from ludus.trainer.learner.tree_attention import (
    QUERY_BLOCK_SIZE,
    make_ancestor_mask,
    make_tree_mask,
    use_tree_attention,
)


def make_ends(length: int, seed: int) -> Tensor:
    """Return the ends of the nodes of random trees in preorder."""
    generator = torch.Generator().manual_seed(seed)
    ends, path = [length] * length, list[int]()
    for node in range(length):
        if torch.rand((), generator=generator) < 8 / length:
            depth = int(torch.randint(len(path) + 1, (), generator=generator))
            for ancestor in path[depth:]:
                ends[ancestor] = node
            del path[depth:]
        path.append(node)
    return torch.tensor(ends)


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM(config)


def compute(model: Qwen2ForCausalLM, token_ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Return log-probs, and the gradients of their weighted sum."""
    logits = model(input_ids=token_ids, attention_mask=mask, use_cache=False).logits
    logprobs = logits.log_softmax(-1)
    weights = torch.linspace(-1, 1, logprobs.numel()).view(logprobs.shape)
    model.zero_grad()
    (logprobs * weights).mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logprobs.detach(), *gradients]


@pytest.mark.parametrize(
    "length", [1, QUERY_BLOCK_SIZE, QUERY_BLOCK_SIZE + 1, 2 * QUERY_BLOCK_SIZE + 77]
)
def test_blocks_give_the_logprobs_and_gradients_of_a_dense_mask(length: int) -> None:
    ends = torch.stack([make_ends(length, seed) for seed in range(2)])
    token_ids = torch.randint(64, ends.shape, generator=torch.Generator().manual_seed(1))
    model = make_model()
    expected = compute(model, token_ids, make_ancestor_mask(ends))
    use_tree_attention(model)
    mask = make_tree_mask(model, ends)
    assert mask.numel() == ends.numel()
    for actual, reference in zip(compute(model, token_ids, mask), expected, strict=True):
        torch.testing.assert_close(actual, reference, atol=1e-5, rtol=1e-5)


def test_other_attention_functions_get_a_dense_mask() -> None:
    model, ends = make_model(), make_ends(9, 0)[None]
    model.set_attn_implementation("eager")
    use_tree_attention(model)
    assert make_tree_mask(model, ends).equal(make_ancestor_mask(ends))

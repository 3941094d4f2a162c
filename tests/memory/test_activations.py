"""The formula for activations, compared with the tensors that a forward pass keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from ludus.proto.config import LanguageModelRun
from ludus.trainer.learner.tree_attention import make_ancestor_mask
from ludus.trainer.setup.memory.learner import RankMemory
from ludus.trainer.setup.memory.shape import measure_skeleton
from tests.learner.memory_peak import MemoryPeak

FEW_TOKENS, MANY_TOKENS = 128, 256
SIZES = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def make_memory(
    model: torch.nn.Module, packing: str, dtype: str, *, has_checkpointing: bool
) -> RankMemory:
    """Return the memory of a rank whose micro-batches have one row."""
    learner = {"packing": packing, "dtype": dtype, "activation_checkpointing": has_checkpointing}
    rollout = {"max_tokens": FEW_TOKENS}
    run = LanguageModelRun.model_validate({"learner": learner, "rollout": rollout})
    return RankMemory(run, measure_skeleton(model, None))


def estimate(memory: RankMemory, num_tokens: int) -> int:
    parts = {part.name: part.num_bytes for part in memory.list_step_parts(num_tokens)}
    return parts[f"activations of {num_tokens} tokens"]


@pytest.mark.parametrize("has_checkpointing", [False, True])
@pytest.mark.parametrize("packing", ["tree", "pad"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_activations_are_within_a_tenth_of_the_tensors_of_a_forward_pass(
    config_class: type[PretrainedConfig], dtype: str, packing: str, has_checkpointing: bool
) -> None:
    config = config_class(**SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.to(getattr(torch, dtype))
    memory = make_memory(model, packing, dtype, has_checkpointing=has_checkpointing)
    first_layer = model.model.layers[0]
    if has_checkpointing:
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = checkpoint_wrapper(layer)

    def measure(num_tokens: int) -> int:
        arguments = make_arguments(num_tokens, packing)
        num_bytes = measure_model(model, num_tokens, arguments)
        if has_checkpointing:  # the backward pass computes one layer at a time again
            num_bytes += measure_layer(model, first_layer, num_tokens, arguments)
        return num_bytes

    # The difference of two sizes leaves out the weights, of which the layers make views.
    estimated_bytes = estimate(memory, MANY_TOKENS) - estimate(memory, FEW_TOKENS)
    measured_bytes = measure(MANY_TOKENS) - measure(FEW_TOKENS)
    assert estimated_bytes == pytest.approx(measured_bytes, rel=0.1)


def make_arguments(num_tokens: int, packing: str) -> dict[str, Tensor | None]:
    """Return the mask and the positions that the learner passes to a model."""
    if packing == "pad":
        return {"attention_mask": None, "position_ids": torch.arange(num_tokens)[None]}
    ends = torch.full((1, num_tokens), num_tokens)
    mask = make_ancestor_mask(ends)
    return {"attention_mask": mask, "position_ids": torch.arange(num_tokens)[None]}


def measure_model(model: nn.Module, num_tokens: int, arguments: dict[str, Tensor | None]) -> int:
    """Return the size of all tensors that exist after a forward pass."""
    token_ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    with MemoryPeak() as memory_peak:
        output = model.model(token_ids, use_cache=False, **arguments)
        num_bytes = memory_peak.num_bytes
    del output
    mask = arguments["attention_mask"]
    return num_bytes + (0 if mask is None else mask.nbytes)


def measure_layer(
    model: nn.Module, layer: nn.Module, num_tokens: int, arguments: dict[str, Tensor | None]
) -> int:
    """Return the size of all tensors that exist after a forward pass of a layer."""
    hidden_states = torch.zeros(1, num_tokens, SIZES["hidden_size"], dtype=model.dtype)
    embeddings = model.model.rotary_emb(hidden_states, arguments["position_ids"])
    mask = arguments["attention_mask"]
    with MemoryPeak() as memory_peak:
        output = layer(
            hidden_states.requires_grad_(), attention_mask=mask, position_embeddings=embeddings
        )
        num_bytes = memory_peak.num_bytes
    del output
    return num_bytes

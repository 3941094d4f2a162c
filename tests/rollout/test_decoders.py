"""Completions of many model types, in batches of different lengths and over two turns."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ludus.trainer.core.interfaces import EngineOutput, EngineRequest
from ludus.trainer.core.types import Sampling
from ludus.trainer.rollout.engines.decoders import PaddedDecoder, UniformDecoder, make_decoder
from ludus.trainer.rollout.engines.prefixes import BLOCK_TOKENS, find_shared_beginnings
from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine
from tests.rollout.engine_pair import add_noise, complete, compute_max_error, drain

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}


def make_model(model_type: str) -> PreTrainedModel:
    """Return a small model with random weights that are far from zero."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **MODELS[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    add_noise(model, seed=0, scale=0.15)
    return model


@pytest.mark.parametrize("model_type", MODELS)
def test_logprobs_equal_full_passes(model_type: str) -> None:
    model, rng = make_model(model_type), random.Random(0)
    engine = TransformersEngine(model, end_token_ids=[1])
    prompts = [[rng.randrange(3, 96) for _ in range(rng.choice([3, 8, 21, 40]))] for _ in range(12)]
    prompts += [prompts[0]] * 4
    requests = [EngineRequest(i, ids, Sampling(1.0, 10), seed=i) for i, ids in enumerate(prompts)]
    outputs: dict[int, EngineOutput] = {}
    for request in requests:
        engine.submit(request)
        outputs |= {output.request_id: output for output in engine.step()}
    outputs |= drain(engine)
    next_requests = [
        EngineRequest(
            100 + i, [*ids, *outputs[i].token_ids, *range(5, 7 + i % 3)], Sampling(1.0, 6), seed=i
        )
        for i, ids in enumerate(prompts)
    ]
    outputs |= complete(engine, next_requests)
    assert compute_max_error(model, requests + next_requests, outputs) < 1e-5


@pytest.mark.parametrize("model_type", MODELS)
def test_logprobs_after_shared_beginnings_equal_full_passes(model_type: str) -> None:
    model, rng = make_model(model_type), random.Random(1)
    long_beginning = [rng.randrange(3, 96) for _ in range(53)]
    beginnings = [long_beginning, long_beginning[:36], [*range(3, 23)], [4]]
    prompts = [
        beginnings[i % 4] + [rng.randrange(3, 96) for _ in range(rng.randrange(1, 30))]
        for i in range(16)
    ]
    requests = [EngineRequest(i, ids, Sampling(1.0, 8), seed=i) for i, ids in enumerate(prompts)]
    outputs = complete(TransformersEngine(model, end_token_ids=[1]), requests)
    assert compute_max_error(model, requests, outputs) < 1e-5


@given(
    sequences=st.lists(
        st.builds(
            lambda start, num_tokens, tail: [start] * num_tokens + tail,
            st.integers(0, 1),
            st.integers(0, 60),
            st.lists(st.integers(0, 2), max_size=20),
        ),
        max_size=12,
    )
)
def test_shared_beginnings_are_whole_blocks_of_several_sequences(
    sequences: list[list[int]],
) -> None:
    for beginning in find_shared_beginnings(sequences):
        length = len(beginning)
        assert length > 0
        assert length % BLOCK_TOKENS == 0
        assert sum(sequence[:length] == beginning for sequence in sequences) > 1


@pytest.mark.parametrize("num_groups", [1, 8])
def test_equal_completed_sequences_are_stored_once_and_as_many_as_fit(num_groups: int) -> None:
    model, group_size, num_tokens = make_model("qwen2"), 8, 3 * BLOCK_TOKENS
    groups = [[number, *range(4, 3 + num_tokens)] for number in range(num_groups)]
    sequences = [sequence for sequence in groups for _ in range(group_size)]
    num_bytes = 4 * num_tokens * make_decoder(model, 0).bytes_per_token
    decoder = make_decoder(model, num_bytes)
    decoder.add(sequences, 1)
    decoder.keep([], list(enumerate(sequences)))
    num_computed = 0

    def count_tokens(_: object, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal num_computed
        num_computed += kwargs["input_ids"].numel()

    model.register_forward_pre_hook(count_tokens, with_kwargs=True)
    decoder.add([[*sequences[0], 5]], 1)
    assert num_computed == 1


def test_models_that_cannot_be_padded_use_uniform_batches() -> None:
    assert isinstance(make_decoder(make_model("gpt2"), 0), PaddedDecoder)
    assert isinstance(make_decoder(make_model("lfm2"), 0), UniformDecoder)


def test_model_that_ignores_padding_uses_uniform_batches() -> None:
    model = make_model("qwen2")

    def ignore_mask(_: object, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None}

    model.register_forward_pre_hook(ignore_mask, with_kwargs=True)
    assert isinstance(make_decoder(model, 0), UniformDecoder)
    assert model.config._attn_implementation == "sdpa"

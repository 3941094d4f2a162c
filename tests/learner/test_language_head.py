"""Log-probs, entropies and gradients of large vocabularies, and the memory that they need."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from ludus.proto.config import LoraConfig
from ludus.trainer.core.ragged import RaggedArray
from ludus.trainer.learner import chunked_logprobs, language_head, lora
from ludus.trainer.learner.micro_batches import (
    PackedRows,
    make_unscored_sample,
    pack_one_micro_batch,
)
from ludus.trainer.learner.model import PolicyModel
from tests.learner.memory_peak import MemoryPeak

VOCAB_SIZE = 50
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
TEMPERATURE = 0.7
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}


class CubedLogitsModel(LlamaForCausalLM):
    """A model that changes its logits in a way that the learner does not know."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits**3
        return output


def make_lora_model() -> PreTrainedModel:
    """Return a model with adapters on its attention and on its head."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    lora.add_adapters(model, LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "lm_head")))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.2)
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "bias": lambda: PhiForCausalLM(PhiConfig(**SIZES)),
    "capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=3.0, sliding_window=64)
    ),
    "multiplied": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
    "lora": make_lora_model,
    "unknown": lambda: CubedLogitsModel(LlamaConfig(**SIZES, tie_word_embeddings=False)),
}


def make_rows(num_tokens: int, vocab_size: int = VOCAB_SIZE, *, num_allowed: int = 0) -> PackedRows:
    """Return rows of two sequences with `num_tokens` sampled tokens each."""
    generator = random.Random(0)
    samples = []
    for _ in range(2):
        token_ids = [generator.randrange(1, vocab_size) for _ in range(num_tokens + 3)]
        sample = make_unscored_sample(token_ids, [False] * 3 + [True] * num_tokens)
        if num_allowed:
            allowed_ids = [
                sorted(
                    {token_id, *(generator.randrange(1, vocab_size) for _ in range(num_allowed))}
                )
                for token_id in token_ids[3:]
            ]
            sample = replace(sample, allowed_ids=RaggedArray.from_rows(allowed_ids, np.int32))
        samples.append(sample)
    return pack_one_micro_batch(samples).rows


def compute(policy: PolicyModel, rows: PackedRows, mode: str) -> list[Tensor]:
    """Return log-probs, entropies and the gradients of a loss of both."""
    output = policy(rows, TEMPERATURE, mode)
    return list_results(policy, output.logprobs, output.entropies, mode)


def compute_expected(policy: PolicyModel, rows: PackedRows, mode: str) -> list[Tensor]:
    """Return the results of `compute` from all logits of a plain forward pass."""
    logits = policy.language_model(input_ids=rows.token_ids, use_cache=False).logits / TEMPERATURE
    logits = logits.flatten(0, 1)[rows.positions][rows.position_of_target]
    if rows.allowed_ids is not None:
        is_allowed = torch.zeros(len(logits), VOCAB_SIZE + 1, dtype=torch.bool)
        is_allowed.scatter_(1, rows.allowed_ids % (VOCAB_SIZE + 1), True)
        logits = logits.masked_fill(~is_allowed[:, :-1], -1e30)
    all_logprobs = logits.log_softmax(-1)
    logprobs = all_logprobs.gather(1, rows.target_ids[:, None])[:, 0]
    entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return list_results(policy, logprobs, None if mode == "none" else entropies, mode)


def list_results(
    policy: PolicyModel, logprobs: Tensor, entropies: Tensor | None, mode: str
) -> list[Tensor]:
    """Return the outputs and the gradients of a loss of both."""
    weights = torch.arange(1.0, 1.0 + len(logprobs), dtype=logprobs.dtype) / 10
    loss = (logprobs * weights).sum()
    if mode == "gradient":
        assert entropies is not None
        loss = loss + (entropies * weights.flip(0)).sum()
    parameters = [weight for weight in policy.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    tensors = (logprobs, entropies, *gradients)
    return [tensor.detach() for tensor in tensors if tensor is not None]


@pytest.fixture(params=[9, 1000], ids=["chunks", "one_chunk"])
def chunk_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Use chunks of this number of positions, however few the logits are."""
    monkeypatch.setattr(chunked_logprobs, "MAX_CHUNK_LOGITS", request.param * VOCAB_SIZE)
    monkeypatch.setattr(language_head, "MAX_PLAIN_LOGITS", 0)
    size: int = request.param
    return size


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_allowed", [0, 4], ids=["free", "restricted"])
def test_outputs_and_gradients_equal_those_of_all_logits(
    kind: str, dtype: torch.dtype, num_allowed: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    policy = PolicyModel(MODELS[kind]().to(dtype)).eval()
    rows = make_rows(20, num_allowed=num_allowed)
    for mode in ("none", "value", "gradient"):
        results, expected_results = (
            function(policy, rows, mode) for function in (compute, compute_expected)
        )
        assert len(results) == len(expected_results) > 2
        for result, expected_result in zip(results, expected_results, strict=True):
            scale = max(1.0, float(expected_result.abs().max()))
            assert (result - expected_result).abs().max() <= TOLERANCES[dtype] * scale
    assert ("CubedLogitsModel" in caplog.text) == (kind == "unknown")


@pytest.mark.usefixtures("chunk_size")
def test_disabled_adapters_of_the_head_have_no_effect() -> None:
    policy = PolicyModel(make_lora_model()).eval()
    rows = make_rows(20)
    with torch.no_grad():
        adapted_logprobs = policy(rows, 1.0).logprobs
        lora.set_adapters_enabled(policy, False)
        logprobs = policy(rows, 1.0).logprobs
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.zero_()
        lora.set_adapters_enabled(policy, True)
        assert torch.allclose(policy(rows, 1.0).logprobs, logprobs, atol=1e-6)
    assert not torch.allclose(adapted_logprobs, logprobs, atol=0.1)


def test_chunks_in_bfloat16_do_not_add_to_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MODELS["untied"]()
    rows = make_rows(200)
    exact_gradients = compute_expected(PolicyModel(model).eval(), rows, "gradient")[2:]
    policy = PolicyModel(model.bfloat16()).eval()
    errors = []
    for chunk_size in (1000, 4):
        monkeypatch.setattr(chunked_logprobs, "MAX_CHUNK_LOGITS", chunk_size * VOCAB_SIZE)
        monkeypatch.setattr(language_head, "MAX_PLAIN_LOGITS", 0)
        results = compute(policy, rows, "gradient")
        assert results[0].dtype == results[1].dtype == torch.float32
        # The last gradient is that of the head.
        errors.append(float((results[-1].float() - exact_gradients[-1]).norm()))
    assert errors[1] < 1.1 * errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["value", "gradient"])
def test_memory_for_logits_does_not_grow_with_the_positions(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size, chunk_size = 10_000, 64
    monkeypatch.setattr(chunked_logprobs, "MAX_CHUNK_LOGITS", chunk_size * vocab_size)
    config = LlamaConfig(**{**SIZES, "vocab_size": vocab_size, "max_position_embeddings": 8192})
    policy = PolicyModel(LlamaForCausalLM(config)).eval()
    peaks = []
    for num_positions in (128, 512, 2048):
        rows = make_rows(num_positions // 2, vocab_size)
        hidden_states = torch.randn(num_positions + 6, SIZES["hidden_size"])
        # The memory of the layers grows with the number of tokens, so the test replaces them.
        monkeypatch.setattr(
            policy.language_model.model,
            "forward",
            lambda states=hidden_states, **_: BaseModelOutputWithPast(
                last_hidden_state=states.view(2, -1, SIZES["hidden_size"]).requires_grad_()
            ),
        )
        compute(policy, make_rows(2, vocab_size), mode)
        with MemoryPeak() as memory:
            compute(policy, rows, mode)
        peaks.append(memory.peak_bytes / (chunk_size * vocab_size * 4))
    assert max(peaks) < 4, "a peak exceeds the logits of four chunks"
    assert peaks[2] < 1.1 * peaks[0] + 0.2


def test_restricted_tokens_need_the_logits_of_allowed_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab_size, num_positions = 10_000, 256
    config = LlamaConfig(**{**SIZES, "vocab_size": vocab_size})
    policy = PolicyModel(LlamaForCausalLM(config)).eval()
    rows = make_rows(num_positions // 2, vocab_size, num_allowed=1)
    with torch.no_grad():
        policy(rows, 1.0)
        with MemoryPeak() as memory:
            policy(rows, 1.0, "value")
    assert memory.peak_bytes < num_positions * vocab_size * 4 / 3

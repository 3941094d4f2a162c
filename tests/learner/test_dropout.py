"""Training without dropout: the learner and the sampler have the same policy.

The models have layers with dropout, whose masks would differ between two passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from ludus.proto.config import AlgorithmConfig, GrpoConfig, PpoConfig
from ludus.trainer.core.interfaces import EngineRequest
from ludus.trainer.core.types import Batch, Coefficients, Sampling, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.models.load import load_tokenizer
from tests.learner.tiny_policy import make_batch, make_learner
from tests.rollout.engine_pair import complete, make_transformers_engine

FROZEN = Coefficients(learning_rate=1e-12, entropy=0.0, kl=0.1)
"""A learning rate that changes no log-prob, so every measured difference is noise."""
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
RATE = 0.3
"""Probability of dropout, large enough to be measured."""


def make_model(name: str, vocab_size: int) -> PreTrainedModel:
    """Return a small random model of an architecture with dropout."""
    match name:
        case "gpt2":
            rates = {"resid_pdrop": RATE, "embd_pdrop": RATE, "attn_pdrop": RATE}
            config = GPT2Config(
                vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=2, n_positions=256, **rates
            )
            return GPT2LMHeadModel(config)
        case "opt":
            rates = {"dropout": RATE, "attention_dropout": RATE, "layerdrop": RATE}
            sizes = {"ffn_dim": 64, "word_embed_proj_dim": 32}
            return OPTForCausalLM(OPTConfig(vocab_size=vocab_size, **SIZES, **sizes, **rates))
        case "falcon":
            rates = {"hidden_dropout": RATE, "attention_dropout": RATE}
            return FalconForCausalLM(FalconConfig(vocab_size=vocab_size, **SIZES, **rates))
        case _:
            rates = {"resid_pdrop": RATE, "embd_pdrop": RATE, "attention_dropout": RATE}
            return PhiForCausalLM(
                PhiConfig(vocab_size=vocab_size, **SIZES, intermediate_size=64, **rates)
            )


@pytest.fixture
def random_model_path(request: pytest.FixtureRequest, model_path: str, tmp_path: Path) -> str:
    """Save a model of the architecture `request.param` with the tokenizer of the tiny model."""
    tokenizer = load_tokenizer(model_path)
    torch.manual_seed(0)
    make_model(request.param, len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("random_model_path", ["gpt2", "opt", "falcon", "phi"], indirect=True)
@pytest.mark.parametrize(
    "algorithm",
    [
        GrpoConfig.model_validate({"kl_coef": 0.1, "geometric_mask": None}),
        PpoConfig.model_validate(
            {"kl_coef": 0.1, "geometric_mask": None, "critic": {"kind": "model"}}
        ),
    ],
    ids=["grpo", "ppo with a critic model"],
)
def test_passes_of_an_unchanged_model_agree(
    random_model_path: str, algorithm: AlgorithmConfig
) -> None:
    learner = make_learner(
        random_model_path, algorithm, num_minibatches=2, update_epochs=2, packing="pad"
    )
    metrics = learner.train_step(make_batch(), FROZEN)
    assert metrics.clip_ratio == 0.0
    assert metrics.reference_kl == pytest.approx(0.0, abs=1e-5)


def sample_batch(model_path: str) -> Batch:
    """Return completions of the sampling engine, with the log-probs that it reports."""
    prompts = [[5 + index % 3, 60, 33 + index % 2] for index in range(24)]
    requests = [
        EngineRequest(index, prompt, Sampling(1.0, 3 + index % 5), seed=index)
        for index, prompt in enumerate(prompts)
    ]
    outputs = complete(make_transformers_engine(model_path), requests)
    samples = []
    for index, prompt in enumerate(prompts):
        output = outputs[index]
        num_tokens = len(output.token_ids)
        padding, value = [0.0] * len(prompt), 1.0 - index % 3
        samples.append(
            TrainingSample(
                prompt + output.token_ids,
                [False] * len(prompt) + [True] * num_tokens,
                padding + output.logprobs,
                padding + [value] * num_tokens,
                padding + [0.0] * (num_tokens - 1) + [value],
                terminated=index % 4 != 0,
            )
        )
    return collate(samples)


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [0.0, 1e-12])
@pytest.mark.parametrize("packing", ["pad", "tree"])
@pytest.mark.parametrize(
    "algorithm",
    [{"kind": "grpo"}, {"kind": "ppo"}, {"kind": "ppo", "critic": {"kind": "model"}}],
    ids=["grpo", "ppo", "ppo with a critic model"],
)
def test_sampler_and_learner_of_gpt2_with_dropout_agree(
    algorithm: dict[str, Any], packing: str, learning_rate: float, model_path: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(model_path)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=256,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, initializer_range=0.2,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    learner = make_learner(
        str(tmp_path),
        TypeAdapter(AlgorithmConfig).validate_python(algorithm),
        num_minibatches=2,
        update_epochs=2,
        packing=packing,
    )
    metrics = learner.train_step(
        sample_batch(str(tmp_path)), Coefficients(learning_rate, entropy=0.0, kl=0.0)
    )
    assert abs(metrics.mismatch_kl) < 1e-6
    assert metrics.clip_ratio == 0.0
    assert metrics.masked_token_ratio == 0.0

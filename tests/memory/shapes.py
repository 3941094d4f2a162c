"""Shapes of models, without files."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, Qwen2Config, Qwen2ForCausalLM

from ludus.trainer.setup.memory.shape import ModelShape, measure_skeleton


def make_bench_config(num_layers: int) -> PretrainedConfig:
    """Return the configuration of a model of bench/learner_memory.py."""
    return Qwen2Config(
        vocab_size=4096,
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=num_layers,
        num_attention_heads=10,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )


def measure_bench_shape(num_layers: int) -> ModelShape:
    """Return the shape of a model of bench/learner_memory.py."""
    with torch.device("meta"):
        return measure_skeleton(Qwen2ForCausalLM(make_bench_config(num_layers)), None)

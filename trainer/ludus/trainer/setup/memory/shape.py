"""The sizes of a language model, from its config.json. No weights are read."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

from ludus.proto.config import LoraConfig, ModelConfig, TinyModel
from ludus.trainer.models import load
from ludus.trainer.models.tiny import make_model_config

_LAYER_PATTERN = re.compile(r".*?\blayers\.(\d+)\.|.*?\bh\.(\d+)\.")
"""Pattern of the name of a parameter in one of a model's layers."""
_FULL_ATTENTION = "full_attention"
_COMPRESSING_FIELDS = ("kv_lora_rank", "mamba_d_state", "ssm_cfg", "linear_num_key_heads")
"""Settings of models whose cache is smaller than all keys and values."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a language model. Numbers of parameters count tied parameters once."""

    num_parameters: int
    num_root_parameters: int
    """Parameters outside the layers: embeddings, head and last norm. FSDP2 gathers them first and
    keeps them gathered during a pass."""
    num_layer_parameters: int
    """Parameters of the largest layer."""
    num_largest_parameters: int
    """Parameters of the largest tensor."""
    num_layers: int
    vocab_size: int
    width: int
    """Size of a hidden state."""
    query_size: int
    """Size of the queries of a token in a layer, of all heads."""
    key_size: int
    """Size of the keys of a token in a layer, of all heads."""
    intermediate_size: int
    """Number of hidden units that a token uses in a feed-forward layer."""
    has_query_norm: bool
    """True if queries and keys are normalised."""
    has_full_cache: bool
    """True if every layer caches a key and a value for every token."""
    num_adapter_parameters: int = 0
    """Parameters of LoRA adapters, in addition to `num_parameters`; 0 without adapters."""

    @property
    def num_trained(self) -> int:
        """Number of trained parameters."""
        return self.num_adapter_parameters or self.num_parameters

    @property
    def num_cached_per_token(self) -> int:
        """Number of values in the keys and values of a token, in all layers."""
        return 2 * self.num_layers * self.key_size


def measure_shape(model: ModelConfig) -> ModelShape:
    """Return the sizes of a configured model.

    Raises:
        NotFoundError: there is no model.
    """
    if isinstance(model, TinyModel):
        with torch.device("meta"):
            skeleton: nn.Module = LlamaForCausalLM(make_model_config(model, model.vocab_size))
    else:
        skeleton = load.load_skeleton(model.path)
    return measure_skeleton(skeleton, model.lora)


def measure_path(path: str) -> ModelShape:
    """Return the sizes of the model in a folder or of a Hugging Face id.

    Raises:
        NotFoundError: there is no model.
    """
    return measure_skeleton(load.load_skeleton(path), None)


def measure_skeleton(skeleton: nn.Module, lora: LoraConfig | None) -> ModelShape:
    """Return the sizes of a language model, which needs no data."""
    parameters = dict(skeleton.named_parameters())
    layer_sizes: Counter[str] = Counter()
    for name, parameter in parameters.items():
        match = _LAYER_PATTERN.match(name)
        if match is not None:
            layer_sizes[match[0]] += parameter.numel()
    num_parameters = sum(parameter.numel() for parameter in parameters.values())
    config = skeleton.config.get_text_config()  # type: ignore[operator, union-attr]
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_key_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return ModelShape(
        num_parameters=num_parameters,
        num_root_parameters=num_parameters - sum(layer_sizes.values()),
        num_layer_parameters=max(layer_sizes.values(), default=0),
        num_largest_parameters=max(parameter.numel() for parameter in parameters.values()),
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        query_size=num_heads * head_size,
        key_size=num_key_heads * head_size,
        intermediate_size=_count_hidden_units(config),
        has_query_norm=any("q_norm" in name for name in parameters),
        has_full_cache=_has_full_cache(config),
        num_adapter_parameters=0 if lora is None else _count_adapters(skeleton, lora),
    )


def _count_hidden_units(config: Any) -> int:
    """Return the number of hidden units that a token uses in a feed-forward layer."""
    num_experts = getattr(config, "num_experts_per_tok", None)
    expert_size = getattr(config, "moe_intermediate_size", None)
    if num_experts and expert_size:
        return int(num_experts * expert_size)
    size: int = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return size * (num_experts or 1)


def _has_full_cache(config: Any) -> bool:
    if any(getattr(config, field, None) for field in _COMPRESSING_FIELDS):
        return False
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return all(layer_type == _FULL_ATTENTION for layer_type in layer_types)
    return not getattr(config, "sliding_window", None)


def _count_adapters(skeleton: nn.Module, lora: LoraConfig) -> int:
    """Return the number of parameters of the adapters: rank * (inputs + outputs) per layer."""
    return sum(
        lora.rank * sum(module.weight.shape)
        for name, module in skeleton.named_modules()
        if name.rpartition(".")[2] in lora.targets and hasattr(module, "weight")
    )

"""Low-rank adapters in the learner; only the adapters are trained and published.

add_adapters     W x  becomes  W x + (alpha / rank) B A x;  W is frozen, B starts at zero
gather_adapters  the published weights: A and B of each layer, no base weights
save_adapters    the same weights as files that peft loads
merge_adapters   W + (alpha / rank) B A, for the exported model
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ludus.proto.config import LoraConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.core.interfaces import StateDict
from ludus.trainer.learner.model import gather_parameters
from ludus.trainer.models.load import load_skeleton
from ludus.trainer.weights.adapters import AdapterMerger

ADAPTER_FOLDER = "adapter"
"""Subfolder of an exported model. In the model's folder itself, transformers would load the
adapters instead of the model."""

_ADAPTER_NAME = "default"
_ADAPTER_MARKER = f".{_ADAPTER_NAME}."
_BASE_MARKER = ".base_layer."


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add float32 adapters on the CPU to the model, and freeze all other weights.

    The adapters are initialized from torch's random state, which must be equal on all ranks. The
    other weights may be on the meta device.

    Raises:
        ConfigError: a target does not match the name of any layer.
    """
    _check_targets_exist(_list_linear_layers(model), config)
    # `low_cpu_mem_usage` creates the adapters without data. Otherwise peft would put them on the
    # device of the base weights.
    peft.inject_adapter_in_model(
        _make_peft_config(config), model, adapter_name=_ADAPTER_NAME, low_cpu_mem_usage=True
    )
    for module in model.modules():
        if isinstance(module, LoraLayer):
            _initialize_adapter(module)


def make_base_renamings(config: LoraConfig) -> dict[str, str]:
    """Return the `renamings` with which `load_language_model` finds weights under adapters."""
    return {rf"\b{re.escape(target)}\.": f"{target}{_BASE_MARKER}" for target in config.targets}


def check_targets(model_path: str, config: LoraConfig) -> None:
    """Check that the model has a layer for each target, without reading its weights.

    Raises:
        ConfigError: a target does not match the name of any layer.
        NotFoundError: there is no model.
    """
    _check_targets_exist(_list_linear_layers(load_skeleton(model_path)), config)


@torch.no_grad()
def gather_adapters(model: nn.Module, *, keeps_copies: bool = True) -> dict[str, Tensor]:
    """Return copies of A and B of each layer, on the CPU, by the layer's Hugging Face name.

    A collective if the model is sharded; see `gather_parameters` for `keeps_copies`.
    """
    adapters = (
        (name.replace(_ADAPTER_MARKER, "."), parameter)
        for name, parameter in model.named_parameters()
        if _ADAPTER_MARKER in name
    )
    return gather_parameters(adapters, keeps_copies=keeps_copies)


def get_layer_name(name: str) -> str:
    """Return the layer's name for an adapter, or for a frozen weight under adapters.

    Other names are returned unchanged.
    """
    return re.split(rf"{re.escape(_BASE_MARKER)}|\.lora_[AB]\.", name, maxsplit=1)[0]


def merge_adapters(tensors: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Return float32 weights of a model without adapters.

    Args:
        tensors: weights of a model with adapters. Each adapter needs the weight of its layer.
    """
    adapters = {
        name.replace(_ADAPTER_MARKER, "."): tensor
        for name, tensor in tensors.items()
        if _ADAPTER_MARKER in name
    }
    base_weights = {
        name.replace(_BASE_MARKER, "."): tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
        if _ADAPTER_MARKER not in name
    }
    return AdapterMerger(base_weights, config).merge(adapters)


def save_adapters(
    folder: Path, adapters: StateDict, config: LoraConfig, base_model_path: str
) -> None:
    """Write files that `peft.PeftModel.from_pretrained` loads over the base model."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = _make_peft_config(config).to_dict() | {"base_model_name_or_path": base_model_path}
    json_settings = {
        name: sorted(setting) if isinstance(setting, set) else setting
        for name, setting in settings.items()
    }
    (folder / "adapter_config.json").write_text(json.dumps(json_settings, indent=2, default=str))
    tensors = {f"base_model.model.{name}": tensor for name, tensor in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def set_adapters_enabled(model: nn.Module, is_enabled: bool) -> None:
    """Enable or disable the adapters; without them, the model is the initial policy."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(is_enabled)
    # peft also freezes the adapters that it disables. In the first forward pass, which may be
    # without adapters, FSDP decides how to reduce the gradients of all trained parameters.
    for name, parameter in model.named_parameters():
        if _ADAPTER_MARKER in name:
            parameter.requires_grad_(True)


def _initialize_adapter(layer: LoraLayer) -> None:
    """Initialize the adapter of a layer as peft does."""
    down_layer, up_layer = layer.lora_A[_ADAPTER_NAME], layer.lora_B[_ADAPTER_NAME]
    assert isinstance(down_layer, nn.Linear) and isinstance(up_layer, nn.Linear)
    down_weight = torch.empty(down_layer.weight.shape, dtype=torch.float32)
    nn.init.kaiming_uniform_(down_weight, a=math.sqrt(5))
    down_layer.weight = nn.Parameter(down_weight)
    up_layer.weight = nn.Parameter(torch.zeros(up_layer.weight.shape, dtype=torch.float32))


def _make_peft_config(config: LoraConfig) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # accepts any number
        target_modules=list(config.targets),
        lora_dropout=0.0,
        bias="none",
        task_type=peft.TaskType.CAUSAL_LM,
    )


def _list_linear_layers(model: nn.Module) -> list[str]:
    """Return the sorted last parts of the names of all linear layers that can have adapters.

    A head that shares its weights with the embeddings cannot: the exported weights of the head
    would also change the embeddings.
    """
    tied_head = _find_tied_head(model)
    names = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not tied_head
    )
    return sorted({name.rpartition(".")[2] for name in names})


def _find_tied_head(model: nn.Module) -> nn.Module | None:
    if isinstance(model, PreTrainedModel) and model.config.tie_word_embeddings:
        return model.get_output_embeddings()
    return None


def _check_targets_exist(layers: Iterable[str], config: LoraConfig) -> None:
    missing_targets = sorted(set(config.targets) - set(layers))
    if missing_targets:
        raise ConfigError(
            f"model.lora.targets: the model has no linear layer {missing_targets}; it has "
            f"{list(layers)} (a head that is tied to the embeddings cannot have adapters)"
        )

"""Low-rank adapters in the learner; only the adapters are trained and published.

add_adapters     W x  becomes  W x + (alpha / rank) B A x;  W is frozen, B starts at zero
gather_adapters  the published weights: A and B of each layer, no base weights
save_adapters    the same weights as files that peft loads
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ludus.proto.config import LoraConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.core.interfaces import StateDict
from ludus.trainer.learner.model import gather_parameters
from ludus.trainer.models.load import load_skeleton

ADAPTER_FOLDER = "adapter"
"""Subfolder of an exported model. In the model's folder itself, transformers would load the
adapters instead of the model."""

_ADAPTER_NAME = "default"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add adapters to the model, and freeze all other weights.

    The adapters are initialized from torch's random state, which must be equal on all ranks.

    Raises:
        ConfigError: a target does not match the name of any layer.
    """
    _check_targets_exist(_list_linear_layers(model), config)
    peft.inject_adapter_in_model(_make_peft_config(config), model, adapter_name=_ADAPTER_NAME)


def check_targets(model_path: str, config: LoraConfig) -> None:
    """Check that the model has a layer for each target, without reading its weights.

    Raises:
        ConfigError: a target does not match the name of any layer.
        NotFoundError: there is no model.
    """
    _check_targets_exist(_list_linear_layers(load_skeleton(model_path)), config)


def gather_adapters(model: nn.Module, *, keeps_copies: bool = True) -> dict[str, Tensor]:
    """Return copies of A and B of each layer, on the CPU, by the layer's Hugging Face name.

    A collective if the model is sharded; see `gather_parameters` for `keeps_copies`.
    """
    return _gather_selected(model, selects_adapters=True, keeps_copies=keeps_copies)


def gather_base_weights(model: nn.Module, *, keeps_copies: bool = True) -> dict[str, Tensor]:
    """Return copies of the frozen weights, in the same way as `gather_adapters`."""
    return _gather_selected(model, selects_adapters=False, keeps_copies=keeps_copies)


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


@torch.no_grad()
def _gather_selected(
    model: nn.Module, *, selects_adapters: bool, keeps_copies: bool
) -> dict[str, Tensor]:
    marker = f".{_ADAPTER_NAME}."
    parameters = (
        (name.replace(marker, ".").replace(".base_layer.", "."), parameter)
        for name, parameter in model.named_parameters()
        if (marker in name) == selects_adapters
    )
    return gather_parameters(parameters, keeps_copies=keeps_copies)


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

"""Low-rank adapters in the learner: they alone are trained, published and clipped.

add_adapters     W x  becomes  W x + (alpha / rank) B A x;  W is frozen, B starts at zero
adapter_state    what is published: A and B of each layer, no base weights
save_adapters    the same as files that peft loads
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import peft
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from transformers import PreTrainedModel

from ludus.proto.config import LoraConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.core.interfaces import StateDict
from ludus.trainer.learner.model import full_tensor
from ludus.trainer.models.load import load_skeleton

ADAPTER_FOLDER = "adapter"
"""Inside an exported model's folder: beside its files, transformers would take the adapters for
the model itself."""

_ADAPTER = "default"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add adapters to the model, and freeze everything else.

    They start from torch's random state: ranks must have seeded it alike.

    Raises:
        ConfigError: the model has no layer of a target's name.
    """
    _refuse_missing_targets(_linear_layers(model), config)
    peft.inject_adapter_in_model(_peft_config(config), model, adapter_name=_ADAPTER)


def check_targets(model_path: str, config: LoraConfig) -> None:
    """Refuse targets that the model lacks, before anything heavy starts: no weights are read.

    Raises:
        ConfigError: the model has no layer of a target's name.
        NotFoundError: there is no model.
    """
    _refuse_missing_targets(_linear_layers(load_skeleton(model_path)), config)


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """A and B of each layer, whole and on the CPU, by the names of the Hugging Face layers.

    A collective where the model is sharded.
    """
    return {
        name.replace(_CHECKPOINT_PREFIX, "").replace(f".{_ADAPTER}.", "."): full_tensor(parameter)
        for name, parameter in model.named_parameters()
        if f".{_ADAPTER}." in name
    }


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """The frozen weights, whole and on the CPU, by their Hugging Face names.

    A collective where the model is sharded.
    """
    return {
        name.replace(_CHECKPOINT_PREFIX, "").replace(".base_layer.", "."): full_tensor(parameter)
        for name, parameter in model.named_parameters()
        if f".{_ADAPTER}." not in name
    }


def save_adapters(
    folder: Path, adapters: StateDict, config: LoraConfig, base_model_path: str
) -> None:
    """Write files that `peft.PeftModel.from_pretrained` loads over the base model."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = _peft_config(config).to_dict() | {"base_model_name_or_path": base_model_path}
    plain = {
        name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()
    }
    (folder / "adapter_config.json").write_text(json.dumps(plain, indent=2, default=str))
    tensors = {f"base_model.model.{name}": tensor for name, tensor in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def set_adapters_enabled(model: nn.Module, enabled: bool) -> None:
    """Switch the adapters: without them the model is the one that training began with."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(enabled)


def _peft_config(config: LoraConfig) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number will do
        target_modules=list(config.targets),
        lora_dropout=0.0,
        bias="none",
        task_type=peft.TaskType.CAUSAL_LM,
    )


def _linear_layers(model: nn.Module) -> list[str]:
    """The last parts of their names, sorted."""
    found = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return sorted({name.rpartition(".")[2] for name in found})


def _refuse_missing_targets(layers: Iterable[str], config: LoraConfig) -> None:
    missing = sorted(set(config.targets) - set(layers))
    if missing:
        raise ConfigError(
            f"model.lora.targets: the model has no linear layer {missing}; it has {list(layers)}"
        )

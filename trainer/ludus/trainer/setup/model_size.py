"""The number of parameters of a language model, without reading its weights."""

from __future__ import annotations

from torch import nn

from ludus.proto.config import LoraConfig, PretrainedModel
from ludus.proto.runs import ModelSize
from ludus.trainer.models import load


def measure_model(model: PretrainedModel) -> ModelSize:
    """Return the number of parameters of a model, and how many of them training changes.

    Raises:
        NotFoundError: there is no model.
    """
    skeleton = load.load_skeleton(model.path)
    num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    num_trained = num_parameters if model.lora is None else _count_adapters(skeleton, model.lora)
    return ModelSize(num_parameters=num_parameters, num_trained=num_trained)


def _count_adapters(skeleton: nn.Module, lora: LoraConfig) -> int:
    """Return the number of parameters of the adapters: rank * (inputs + outputs) per layer."""
    return sum(
        lora.rank * sum(module.weight.shape)
        for name, module in skeleton.named_modules()
        if name.rpartition(".")[2] in lora.targets and hasattr(module, "weight")
    )

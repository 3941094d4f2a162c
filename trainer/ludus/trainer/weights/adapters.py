"""Adapters and base weights become the tensors that any engine loads.

    learner            base W (frozen), A, B  --  A, B travel  -->  worker: W + (alpha / rank) B A

Merging at the worker, and not an engine's own support for adapters, serves every engine alike,
and costs sampling nothing. The base weights stay in the worker's memory, in the type of the
file they come from.
"""

from __future__ import annotations

import torch

from ludus.proto.config import LoraConfig
from ludus.proto.errors import WeightSyncError
from ludus.trainer.core.interfaces import StateDict
from ludus.trainer.models.load import load_language_model

DOWN, UP = "lora_A.weight", "lora_B.weight"
"""Ends of the names under which A [rank, in] and B [out, rank] of a layer travel."""


class AdapterMerger:
    """Base weights that adapters are added to."""

    def __init__(self, base: StateDict, config: LoraConfig) -> None:
        self._base = base
        self._scale = config.alpha / config.rank

    @classmethod
    def load(cls, model_path: str, config: LoraConfig) -> AdapterMerger:
        """A merger with the weights of the model that training began with."""
        model = load_language_model(model_path, "auto")
        return cls({name: tensor.detach() for name, tensor in model.named_parameters()}, config)

    @torch.no_grad()
    def merge(self, adapters: StateDict) -> dict[str, torch.Tensor]:
        """All tensors of the model, by their Hugging Face names; those with adapters in float32.

        Raises:
            WeightSyncError: the adapters are of another model.
        """
        merged = dict(self._base)
        layers = {name.rpartition(".lora_")[0] for name in adapters}
        for layer in layers:
            down, up = adapters.get(f"{layer}.{DOWN}"), adapters.get(f"{layer}.{UP}")
            base = self._base.get(f"{layer}.weight")
            if down is None or up is None or base is None or base.shape != (len(up), len(down.T)):
                raise WeightSyncError(
                    f"expected adapters of this model's linear layers, got some of '{layer}'; "
                    "learner and workers must start from the same model.path"
                )
            merged[f"{layer}.weight"] = base.float() + self._scale * (up.float() @ down.float())
        return merged

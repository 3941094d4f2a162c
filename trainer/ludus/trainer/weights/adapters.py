"""Merging of adapters and base weights into the tensors that any engine loads.

    learner            base W (frozen), A, B  --  A, B  -->  worker: W + (alpha / rank) B A

Merging in the worker works with every engine, even without adapter support, and does not slow down
sampling. The base weights stay in the worker's memory, in the type of their file.
"""

from __future__ import annotations

import torch

from ludus.proto.config import LoraConfig
from ludus.proto.errors import WeightSyncError
from ludus.trainer.core.interfaces import StateDict
from ludus.trainer.models.load import load_language_model

DOWN_SUFFIX, UP_SUFFIX = "lora_A.weight", "lora_B.weight"
"""Suffixes of the names under which A [rank, in] and B [out, rank] of a layer are published."""


class AdapterMerger:
    """A merger that adds adapters to base weights."""

    def __init__(self, base_weights: StateDict, config: LoraConfig) -> None:
        self._base_weights = base_weights
        self._scale = config.alpha / config.rank

    @classmethod
    def load(cls, model_path: str, config: LoraConfig) -> AdapterMerger:
        """Load the weights of the starting policy."""
        model = load_language_model(model_path, "auto")
        return cls({name: tensor.detach() for name, tensor in model.named_parameters()}, config)

    @torch.no_grad()
    def merge(self, adapters: StateDict) -> dict[str, torch.Tensor]:
        """Return all tensors of the model, by Hugging Face name; merged tensors are float32.

        Raises:
            WeightSyncError: the adapters belong to a different model.
        """
        weights = dict(self._base_weights)
        layers = {name.rpartition(".lora_")[0] for name in adapters}
        for layer in layers:
            down_weight = adapters.get(f"{layer}.{DOWN_SUFFIX}")
            up_weight = adapters.get(f"{layer}.{UP_SUFFIX}")
            base_weight = self._base_weights.get(f"{layer}.weight")
            if (
                down_weight is None
                or up_weight is None
                or base_weight is None
                or base_weight.shape != (len(up_weight), len(down_weight.T))
            ):
                raise WeightSyncError(
                    f"the adapters of '{layer}' do not match a linear layer of this model; "
                    "learner and workers must start from the same model.path"
                )
            update = up_weight.float() @ down_weight.float()
            weights[f"{layer}.weight"] = base_weight.float() + self._scale * update
        return weights

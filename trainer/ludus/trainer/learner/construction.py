"""Construction of the learner's models on this rank, without a copy of a whole model.

    class and config --> model without data --adapters, value head--> module --FSDP2--> shards
    files ----------------------------------- rows of this rank --------------------------^

A single rank that computes in float32 shards nothing and loads its models like any other program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ludus.proto.config import LanguageModelRun, ModelCritic
from ludus.trainer.learner import lora
from ludus.trainer.learner.actor_critic import Critic, load_critic_model
from ludus.trainer.learner.model import PolicyModel, is_sharded, prepare_model
from ludus.trainer.models.load import load_language_model
from ludus.trainer.models.sharded_reading import Prepare

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class ModelLoader:
    """A loader of the models of a run on one rank. Its methods are collectives."""

    run: LanguageModelRun
    model_path: str
    """Folder or Hugging Face id of the model that the policy and the reference start from."""
    mesh: DeviceMesh
    device: torch.device

    def load_policy(
        self, *, has_value_head: bool = False, offloads_parameters: bool = False
    ) -> PolicyModel:
        """Load a policy, with adapters and a value head if the run has them.

        The frozen weights under adapters have the type of the computation. All other weights are
        float32.
        """
        config, lora_config = self.run.learner, self.run.model.lora
        dtype = getattr(torch, "float32" if lora_config is None else config.dtype)
        renamings = None if lora_config is None else lora.make_base_renamings(lora_config)

        def make_policy(model: PreTrainedModel) -> PolicyModel:
            if lora_config is not None:
                lora.add_adapters(model, lora_config)
            return PolicyModel(model, has_value_head=has_value_head)

        return self._load(
            lambda prepare: load_language_model(
                self.model_path, dtype, prepare=prepare, renamings=renamings
            ),
            make_policy,
            offloads_parameters=offloads_parameters and self.device.type != "cpu",
        )

    def load_critic(self, config: ModelCritic) -> Critic:
        """Load a critic that has its own model."""
        path = config.path or self.model_path
        return self._load(lambda prepare: load_critic_model(path, self.model_path, prepare), Critic)

    def _load(
        self,
        load: Callable[[Prepare | None], PreTrainedModel],
        make_module: Callable[[PreTrainedModel], _Module],
        *,
        offloads_parameters: bool = False,
    ) -> _Module:
        """Load a model, and make the learner's module from it, compiled and sharded.

        Args:
            load: function that loads the model. It calls its argument with the model before it
                reads the weights.
        """
        config, mesh = self.run.learner, self.mesh

        def prepare(model: PreTrainedModel) -> _Module:
            # Dropout would make the learner a different policy than the sampler.
            module = make_module(model).eval()
            return prepare_model(module, config, mesh, offloads_parameters=offloads_parameters)

        if not is_sharded(config, mesh, offloads_parameters=offloads_parameters):
            return prepare(load(None)).to(self.device)
        modules: list[_Module] = []
        load(lambda model: modules.append(prepare(model)))
        # FSDP2 has moved the parameters to the device, but the buffers were read later.
        for buffer in modules[0].buffers():
            buffer.data = buffer.data.to(self.device)
        return modules[0]

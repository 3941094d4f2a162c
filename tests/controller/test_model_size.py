from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from ludus.proto.config import LoraConfig, PretrainedModel
from ludus.trainer.learner import lora
from ludus.trainer.setup.model_size import measure_model
from tests.learner.tiny_policy import make_policy_folder


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_the_size_of_a_model_is_that_of_its_weights(tmp_path: Path, tie_embeddings: bool) -> None:
    path = make_policy_folder(tmp_path / "model", tie_embeddings=tie_embeddings)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    size = measure_model(PretrainedModel(path=path))
    assert size.num_parameters == size.num_trained == count(model.parameters())


@pytest.mark.parametrize("targets", [("q_proj",), ("v_proj", "down_proj")])
def test_with_lora_only_the_adapters_are_trained(tmp_path: Path, targets: tuple[str, ...]) -> None:
    path = make_policy_folder(tmp_path / "model")
    config = LoraConfig(rank=3, targets=targets)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    num_parameters = count(model.parameters())
    lora.add_adapters(model, config)
    size = measure_model(PretrainedModel(path=path, lora=config))
    assert size.num_parameters == num_parameters
    assert size.num_trained == count(p for p in model.parameters() if p.requires_grad)


def count(parameters: object) -> int:
    assert hasattr(parameters, "__iter__")
    return sum(parameter.numel() for parameter in parameters if isinstance(parameter, torch.Tensor))

"""Adapters are published alone, and merging them gives the trained model."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from ludus.proto.config import LoraConfig, load_run_config
from ludus.proto.errors import ConfigError, WeightSyncError
from ludus.trainer.learner.lora import (
    ADAPTER_FOLDER,
    add_adapters,
    check_targets,
    gather_adapters,
    save_adapters,
    set_adapters_enabled,
)
from ludus.trainer.setup.tiny_model import prepare_model
from ludus.trainer.weights.adapters import AdapterMerger

pytestmark = pytest.mark.slow

LORA_CONFIG = LoraConfig(rank=4, alpha=24.0, targets=("q_proj", "v_proj", "down_proj"))
TOKEN_IDS = torch.tensor([[5, 9, 2, 40, 7, 7, 1, 33]])


def make_model(tie_embeddings: bool = False) -> Qwen2ForCausalLM:
    """Return a model of two layers with random weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            tie_word_embeddings=tie_embeddings,
        )
    ).eval()


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def base_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder with the starting model."""
    make_model(request.param).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def train_adapters(base_folder: Path) -> PreTrainedModel:
    """Return the model with adapters, after a few large training steps."""
    model = Qwen2ForCausalLM.from_pretrained(base_folder).eval()
    torch.manual_seed(1)
    add_adapters(model, LORA_CONFIG)
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-2)
    for _ in range(5):
        model(input_ids=TOKEN_IDS, labels=TOKEN_IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def score(model: torch.nn.Module) -> torch.Tensor:
    """Return the log-probs [T, V]."""
    return torch.log_softmax(model(input_ids=TOKEN_IDS).logits[0], dim=-1)


def test_merged_weights_equal_the_model_with_adapters(base_folder: Path) -> None:
    model = train_adapters(base_folder)
    engine = Qwen2ForCausalLM.from_pretrained(base_folder).eval()
    initial_logprobs = score(engine)
    merged_weights = AdapterMerger.load(str(base_folder), LORA_CONFIG).merge(gather_adapters(model))
    assert merged_weights.keys() == dict(engine.named_parameters()).keys()
    engine.load_state_dict(merged_weights, strict=False)
    assert (score(model) - initial_logprobs).abs().max() > 0.1
    torch.testing.assert_close(score(engine), score(model), atol=2e-5, rtol=0)


def test_merging_twice_produces_the_same_weights(base_folder: Path) -> None:
    merger = AdapterMerger.load(str(base_folder), LORA_CONFIG)
    adapters = gather_adapters(train_adapters(base_folder))
    first_weights, second_weights = merger.merge(adapters), merger.merge(adapters)
    assert all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)


def test_only_adapters_are_trained_and_published(base_folder: Path) -> None:
    model = train_adapters(base_folder)
    adapters = gather_adapters(model)
    trainable_weights = [weight for weight in model.parameters() if weight.requires_grad]
    assert sum(tensor.numel() for tensor in adapters.values()) == sum(
        weight.numel() for weight in trainable_weights
    )
    # Two layers: q 32x32, v 32x16, down 48x32, each with rank 4.
    assert sum(tensor.numel() for tensor in adapters.values()) == 2 * 4 * (64 + 48 + 80)
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in adapters)
    initial_weights = dict(Qwen2ForCausalLM.from_pretrained(base_folder).named_parameters())
    frozen_weights = {
        name.replace(".base_layer.", "."): weight
        for name, weight in model.named_parameters()
        if not weight.requires_grad
    }
    assert frozen_weights.keys() == initial_weights.keys()
    assert all(torch.equal(frozen_weights[name], initial_weights[name]) for name in frozen_weights)


def test_new_adapters_do_not_change_the_model(base_folder: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(base_folder).eval()
    initial_logprobs = score(model)
    add_adapters(model, LORA_CONFIG)
    assert torch.equal(score(model), initial_logprobs)


def test_model_with_disabled_adapters_equals_the_initial_model(base_folder: Path) -> None:
    model = train_adapters(base_folder)
    initial_logprobs = score(Qwen2ForCausalLM.from_pretrained(base_folder).eval())
    set_adapters_enabled(model, False)
    assert torch.equal(score(model), initial_logprobs)
    set_adapters_enabled(model, True)
    assert not torch.equal(score(model), initial_logprobs)


def test_peft_loads_exported_files(base_folder: Path, tmp_path: Path) -> None:
    model = train_adapters(base_folder)
    folder = tmp_path / "export" / ADAPTER_FOLDER
    save_adapters(folder, gather_adapters(model), LORA_CONFIG, str(base_folder))
    peft_model = peft.PeftModel.from_pretrained(
        Qwen2ForCausalLM.from_pretrained(base_folder), folder
    ).eval()
    torch.testing.assert_close(score(peft_model), score(model), atol=1e-6, rtol=0)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["lora_alpha"] == 24.0


def test_unknown_target_is_refused(base_folder: Path) -> None:
    wrong_config = LORA_CONFIG.model_copy(update={"targets": ("q_proj", "qkv_proj")})
    message = r"no linear layer \['qkv_proj'\]; it has \[.*'down_proj'.*'q_proj'.*'v_proj'\]"
    with pytest.raises(ConfigError, match=message):
        add_adapters(make_model(), wrong_config)
    with pytest.raises(ConfigError, match=message):
        check_targets(str(base_folder), wrong_config)
    check_targets(str(base_folder), LORA_CONFIG)


async def test_run_with_unknown_target_is_refused_before_loading_weights(
    base_folder: Path, tmp_path: Path
) -> None:
    overrides = [
        "model.kind=pretrained",
        f"model.path={base_folder}",
        'model.lora.targets=["qkv_proj"]',
    ]
    with pytest.raises(ConfigError, match=r"no linear layer \['qkv_proj'\]"):
        await prepare_model(load_run_config(None, overrides), {}, tmp_path)


def test_head_that_is_tied_to_the_embeddings_is_no_target(tmp_path: Path) -> None:
    config = LORA_CONFIG.model_copy(update={"targets": ("q_proj", "lm_head")})
    for is_tied in (True, False):
        model = make_model()
        model.config.tie_word_embeddings = is_tied
        model.config.save_pretrained(tmp_path)
        if not is_tied:
            check_targets(str(tmp_path), config)
            continue
        with pytest.raises(ConfigError, match=r"lora\.targets.*'lm_head'.*tied to the embeddings"):
            check_targets(str(tmp_path), config)


def test_configuration_of_a_tiny_model_with_unknown_target_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.targets.*'qkv_proj'.*'gate_proj'"):
        load_run_config(None, ["model.kind=tiny", 'model.lora.targets=["qkv_proj"]'])


def test_adapters_of_a_different_model_are_refused(base_folder: Path) -> None:
    merger = AdapterMerger.load(str(base_folder), LORA_CONFIG)
    adapters = gather_adapters(train_adapters(base_folder))
    name = next(iter(adapters))
    with pytest.raises(WeightSyncError, match=r"q_proj.*model\.path"):
        merger.merge({key: tensor for key, tensor in adapters.items() if key != name})
    with pytest.raises(WeightSyncError, match=r"same model\.path"):
        merger.merge({f"other.{key}": tensor for key, tensor in adapters.items()})

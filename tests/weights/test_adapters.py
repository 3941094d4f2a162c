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
    gather_base_weights,
    save_adapters,
    set_adapters_enabled,
)
from ludus.trainer.setup.tiny_model import prepare_model
from ludus.trainer.weights.adapters import AdapterMerger

pytestmark = pytest.mark.slow

CONFIG = LoraConfig(rank=4, alpha=24.0, targets=("q_proj", "v_proj", "down_proj"))
IDS = torch.tensor([[5, 9, 2, 40, 7, 7, 1, 33]])


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
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder with the starting model."""
    make_model(request.param).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def train_adapters(base: Path) -> PreTrainedModel:
    """Return the model with adapters, after a few large training steps."""
    model = Qwen2ForCausalLM.from_pretrained(base).eval()
    torch.manual_seed(1)
    add_adapters(model, CONFIG)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-2)
    for _ in range(5):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def logprobs(model: torch.nn.Module) -> torch.Tensor:
    """[T, V]"""
    return torch.log_softmax(model(input_ids=IDS).logits[0], dim=-1)


def test_merged_weights_equal_the_model_with_adapters(base: Path) -> None:
    model = train_adapters(base)
    engine = Qwen2ForCausalLM.from_pretrained(base).eval()
    start = logprobs(engine)
    merged = AdapterMerger.load(str(base), CONFIG).merge(gather_adapters(model))
    assert merged.keys() == dict(engine.named_parameters()).keys()
    engine.load_state_dict(merged, strict=False)
    assert (logprobs(model) - start).abs().max() > 0.1
    torch.testing.assert_close(logprobs(engine), logprobs(model), atol=2e-5, rtol=0)


def test_merging_twice_starts_from_the_base(base: Path) -> None:
    merger = AdapterMerger.load(str(base), CONFIG)
    adapters = gather_adapters(train_adapters(base))
    first, second = merger.merge(adapters), merger.merge(adapters)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_adapters_are_trained_and_published(base: Path) -> None:
    model = train_adapters(base)
    adapters = gather_adapters(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert sum(t.numel() for t in adapters.values()) == sum(p.numel() for p in trainable)
    # Two layers: q 32x32, v 32x16, down 48x32, each with rank 4.
    assert sum(t.numel() for t in adapters.values()) == 2 * 4 * (64 + 48 + 80)
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in adapters)
    untrained = dict(Qwen2ForCausalLM.from_pretrained(base).named_parameters())
    frozen = gather_base_weights(model)
    assert frozen.keys() == untrained.keys()
    assert all(torch.equal(frozen[name], untrained[name]) for name in frozen)


def test_new_adapters_do_not_change_the_model(base: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(base).eval()
    start = logprobs(model)
    add_adapters(model, CONFIG)
    assert torch.equal(logprobs(model), start)


def test_model_without_adapters_is_the_starting_model(base: Path) -> None:
    model = train_adapters(base)
    start = logprobs(Qwen2ForCausalLM.from_pretrained(base).eval())
    set_adapters_enabled(model, False)
    assert torch.equal(logprobs(model), start)
    set_adapters_enabled(model, True)
    assert not torch.equal(logprobs(model), start)


def test_peft_loads_exported_files(base: Path, tmp_path: Path) -> None:
    model = train_adapters(base)
    folder = tmp_path / "export" / ADAPTER_FOLDER
    save_adapters(folder, gather_adapters(model), CONFIG, str(base))
    loaded = peft.PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained(base), folder).eval()
    torch.testing.assert_close(logprobs(loaded), logprobs(model), atol=1e-6, rtol=0)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["lora_alpha"] == 24.0


def test_unknown_target_is_refused(base: Path) -> None:
    wrong = CONFIG.model_copy(update={"targets": ("q_proj", "qkv_proj")})
    expected = r"no linear layer \['qkv_proj'\]; it has \[.*'down_proj'.*'q_proj'.*'v_proj'\]"
    with pytest.raises(ConfigError, match=expected):
        add_adapters(make_model(), wrong)
    with pytest.raises(ConfigError, match=expected):
        check_targets(str(base), wrong)
    check_targets(str(base), CONFIG)


async def test_run_with_unknown_target_is_refused_before_loading_weights(
    base: Path, tmp_path: Path
) -> None:
    model = ["model.kind=pretrained", f"model.path={base}", 'model.lora.targets=["qkv_proj"]']
    with pytest.raises(ConfigError, match=r"no linear layer \['qkv_proj'\]"):
        await prepare_model(load_run_config(None, model), {}, tmp_path)


def test_unknown_target_of_a_tiny_model_is_refused_by_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.targets.*'qkv_proj'.*'gate_proj'"):
        load_run_config(None, ["model.kind=tiny", 'model.lora.targets=["qkv_proj"]'])


def test_adapters_of_a_different_model_are_refused(base: Path) -> None:
    merger = AdapterMerger.load(str(base), CONFIG)
    adapters = gather_adapters(train_adapters(base))
    name = next(iter(adapters))
    with pytest.raises(WeightSyncError, match=r"q_proj.*model\.path"):
        merger.merge({n: t for n, t in adapters.items() if n != name})
    with pytest.raises(WeightSyncError, match=r"same model\.path"):
        merger.merge({f"other.{n}": t for n, t in adapters.items()})

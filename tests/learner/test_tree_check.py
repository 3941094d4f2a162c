"""Packed trees are refused for all models that compute them incorrectly, and for no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ludus.trainer.learner.tree_check import can_pack_trees

CPU = torch.device("cpu")
CLASSES: list[tuple[type[PreTrainedModel], type[PretrainedConfig]]] = [
    (LlamaForCausalLM, LlamaConfig),
    (Qwen2ForCausalLM, Qwen2Config),
    (Qwen3ForCausalLM, Qwen3Config),
    (GPTNeoXForCausalLM, GPTNeoXConfig),
    (Qwen3MoeForCausalLM, Qwen3MoeConfig),
]


def make_config(config_class: type[PretrainedConfig], **changes: object) -> PretrainedConfig:
    fields = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return config_class(**fields | changes)


class MaskIgnoringModel(Qwen2ForCausalLM):
    """A model that ignores the mask and computes causal attention."""

    def forward(self, **inputs: Any) -> Any:
        return super().forward(**inputs | {"attention_mask": None})


class PositionIgnoringModel(Qwen2ForCausalLM):
    """A model that ignores the positions and uses the columns of a row."""

    def forward(self, **inputs: Any) -> Any:
        return super().forward(**inputs | {"position_ids": None})


class SlidingWindowModel(Qwen2ForCausalLM):
    """A model with a sliding window that its configuration does not mention."""

    def forward(self, **inputs: Any) -> Any:
        columns = torch.arange(inputs["input_ids"].shape[1])
        distances = columns[:, None] - columns
        mask = ((distances >= 0) & (distances < 8))[None, None]
        if inputs["attention_mask"] is not None:
            mask = mask & inputs["attention_mask"]
        return super().forward(**inputs | {"attention_mask": mask})


class RecurrentModel(Qwen2ForCausalLM):
    """A model with a layer that adds the previous column's hidden state."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.model.layers[0].register_forward_hook(
            lambda module, args, output: output + 0.3 * output.roll(1, dims=1)
        )


@pytest.mark.parametrize("logits_std", [0.3, 3.0, 4.0])
@pytest.mark.parametrize(("model_class", "config_class"), CLASSES)
def test_correct_models_in_bfloat16_pack_trees(
    model_class: type[PreTrainedModel], config_class: type[PretrainedConfig], logits_std: float
) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        model = model_class(make_config(config_class))
        with torch.no_grad():
            logits = model(torch.arange(32)[None]).logits
            model.get_output_embeddings().weight.mul_(logits_std / logits.std())
        assert can_pack_trees([model.to(torch.bfloat16)], CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "model_class", [MaskIgnoringModel, PositionIgnoringModel, SlidingWindowModel, RecurrentModel]
)
def test_incorrect_models_do_not_pack_trees(
    caplog: pytest.LogCaptureFixture, model_class: type[PreTrainedModel], dtype: torch.dtype
) -> None:
    assert not can_pack_trees([model_class(make_config(Qwen2Config)).to(dtype)], CPU)
    assert "log-probs of packed sequences differ" in caplog.text


def test_declared_sliding_window_does_not_pack_trees(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(
        Qwen2Config, use_sliding_window=True, sliding_window=8, max_window_layers=0
    )
    assert not can_pack_trees([Qwen2ForCausalLM(config)], CPU)
    assert "sliding_attention" in caplog.text


def test_model_that_rejects_the_mask_does_not_pack_trees(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = BloomConfig(vocab_size=512, hidden_size=64, n_layer=2, n_head=4)
    assert not can_pack_trees([BloomForCausalLM(config)], CPU)
    assert "the model fails with packed sequences" in caplog.text


def test_check_leaves_random_numbers_unchanged() -> None:
    model = Qwen2ForCausalLM(make_config(Qwen2Config))
    state = torch.get_rng_state()
    can_pack_trees([model], CPU)
    assert torch.equal(torch.get_rng_state(), state)


def check_different_models(rank: int, folder: str) -> None:
    """Check a correct model on rank 0, and an incorrect model on rank 1."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model_class = MaskIgnoringModel if rank else Qwen2ForCausalLM
    assert not can_pack_trees([model_class(make_config(Qwen2Config))], CPU)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.long
def test_all_ranks_make_the_same_decision(tmp_path: Path) -> None:
    mp.spawn(check_different_models, args=(str(tmp_path),), nprocs=2)

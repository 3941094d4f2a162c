"""LoRA training, in which only the adapters are trained, published and saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ludus.proto.config import GrpoConfig, LoraConfig
from ludus.trainer.core.types import Coefficients, ScoringRequest
from tests.learner.tiny_policy import make_batch, make_learner

pytestmark = pytest.mark.slow

LORA_CONFIG = LoraConfig(rank=4, alpha=8.0)
ALGORITHM = GrpoConfig(kl_coef=0.1, geometric_mask=None)
KL_PENALTY = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_are_trained_and_published(model_path: str, dtype: str) -> None:
    """Test bfloat16 as well, because it shards the model even on one rank."""
    learner = make_learner(model_path, ALGORITHM, lora=LORA_CONFIG, dtype=dtype)
    start_weights = learner.gather_weights()
    learner.train_step(make_batch(), KL_PENALTY)
    end_weights = learner.gather_weights()
    assert start_weights.keys() == end_weights.keys()
    assert all("lora_" in name for name in end_weights)
    changed_names = {
        name for name in end_weights if not torch.equal(start_weights[name], end_weights[name])
    }
    assert changed_names >= {name for name in end_weights if "lora_B" in name}


def test_reference_model_is_the_model_without_adapters(model_path: str) -> None:
    learner = make_learner(model_path, ALGORITHM, lora=LORA_CONFIG)
    first_metrics = learner.train_step(make_batch(), KL_PENALTY)
    second_metrics = learner.train_step(make_batch(seed=1), KL_PENALTY)
    assert first_metrics.reference_kl == pytest.approx(0, abs=1e-6)
    assert second_metrics.reference_kl > 1e-5


def test_exported_model_includes_the_adapters(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path, ALGORITHM, lora=LORA_CONFIG)
    learner.train_step(make_batch(), KL_PENALTY)
    learner.export_model(tmp_path)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    canary = ScoringRequest([5, 9, 17, 33], [44, 12, 2])
    tokens = torch.tensor([canary.prompt_ids + canary.completion_ids])
    logits = AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits
    logprobs = logits.log_softmax(-1)[0, 3:6].gather(1, tokens[0, 4:, None])[:, 0]
    scores = learner.score_completions([canary])
    assert scores[0] == pytest.approx(logprobs.tolist(), abs=1e-5)
    assert 0 <= learner.measure_rounding([canary], scores) < 1e-5


def test_resume_with_adapters_is_exact_and_saves_no_base_weights(
    model_path: str, tmp_path: Path
) -> None:
    full_learner = make_learner(model_path, ALGORITHM)
    full_learner.train_step(make_batch(), KL_PENALTY)
    full_learner.save(tmp_path / "full_model")
    learner = make_learner(model_path, ALGORITHM, lora=LORA_CONFIG)
    learner.train_step(make_batch(seed=1), KL_PENALTY)
    learner.save(tmp_path / "state")
    learner.train_step(make_batch(seed=2), KL_PENALTY)
    resumed_learner = make_learner(model_path, ALGORITHM, lora=LORA_CONFIG)
    resumed_learner.load(tmp_path / "state")
    resumed_learner.train_step(make_batch(seed=2), KL_PENALTY)
    for name, tensor in learner.gather_weights().items():
        assert torch.equal(resumed_learner.gather_weights()[name], tensor)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).iterdir())
        for name in ("full_model", "state")
    ]
    assert sizes[1] < sizes[0] / 3

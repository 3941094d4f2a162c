"""Training adapters: they alone move, they alone are published, the base is the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ludus.proto.config import GrpoConfig, LoraConfig
from ludus.trainer.core.types import Coefficients, ScoringRequest
from tests.learner.tiny_policy import make_batch, make_learner

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=4, alpha=8.0)
TETHERED = GrpoConfig(kl_coef=0.1, geometric_mask=None)
STEP = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_are_published_and_move(model_path: str, dtype: str) -> None:
    """In bfloat16 the model is sharded, also on one rank."""
    learner = make_learner(model_path, TETHERED, lora=LORA, dtype=dtype)
    before = learner.full_state()
    learner.train_step(make_batch(), STEP)
    after = learner.full_state()
    assert before.keys() == after.keys()
    assert all("lora_" in name for name in after)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved >= {name for name in after if "lora_B" in name}, "B starts at 0 and moves at once"


def test_the_reference_is_the_model_without_its_adapters(model_path: str) -> None:
    adapted = make_learner(model_path, TETHERED, lora=LORA)
    first = adapted.train_step(make_batch(), STEP)
    second = adapted.train_step(make_batch(seed=1), STEP)
    assert first.reference_kl == pytest.approx(0, abs=1e-6)
    assert second.reference_kl > 1e-5


def test_an_exported_model_holds_the_adapters(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path, TETHERED, lora=LORA)
    learner.train_step(make_batch(), STEP)
    learner.export_model(tmp_path)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    canary = ScoringRequest([5, 9, 17, 33], [44, 12, 2])
    ids = torch.tensor([canary.prompt_ids + canary.completion_ids])
    logits = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    expected = logits.log_softmax(-1)[0, 3:6].gather(1, ids[0, 4:, None])[:, 0]
    assert learner.score_completions([canary])[0] == pytest.approx(expected.tolist(), abs=1e-5)


def test_stop_and_resume_with_adapters_is_exact_and_leaves_the_base_out(
    model_path: str, tmp_path: Path
) -> None:
    whole = make_learner(model_path, TETHERED)
    whole.train_step(make_batch(), STEP)
    whole.save(tmp_path / "whole")
    straight = make_learner(model_path, TETHERED, lora=LORA)
    straight.train_step(make_batch(seed=1), STEP)
    straight.save(tmp_path / "state")
    straight.train_step(make_batch(seed=2), STEP)
    resumed = make_learner(model_path, TETHERED, lora=LORA)
    resumed.load(tmp_path / "state")
    resumed.train_step(make_batch(seed=2), STEP)
    for name, tensor in straight.full_state().items():
        assert torch.equal(resumed.full_state()[name], tensor)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).iterdir())
        for name in ("whole", "state")
    ]
    assert sizes[1] < sizes[0] / 3

"""Tests of the FLOPs of training and the peak FLOP/s of devices."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ludus.trainer.learner.step_metrics import TrainingWork, find_gpu_peak_flops, measure_peak_flops

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NUM_LAYERS, WIDTH, VOCAB_SIZE, INTERMEDIATE_SIZE = 2, 32, 100, 64


def make_model(*, tie_embeddings: bool = False) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=INTERMEDIATE_SIZE,
        tie_word_embeddings=tie_embeddings,
    )
    return Qwen2ForCausalLM(config)


def make_work(policy_model: Qwen2ForCausalLM, num_devices: int = 1) -> TrainingWork:
    return TrainingWork.for_models([policy_model], CPU, torch.float32, num_devices)


def test_a_token_needs_six_flops_per_weight() -> None:
    num_weights = NUM_LAYERS * (4 * WIDTH**2 + 3 * WIDTH * INTERMEDIATE_SIZE) + WIDTH * VOCAB_SIZE
    # The tolerance covers the biases and norms, which are a few percent of such a small model.
    assert make_work(make_model()).per_token == pytest.approx(6 * num_weights, rel=0.03)
    assert make_work(make_model(tie_embeddings=True)).per_token == make_work(make_model()).per_token


def test_frozen_weights_need_no_gradient_flops() -> None:
    model = make_model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert make_work(model).per_token == pytest.approx(make_work(make_model()).per_token * 4 / 6)


def test_forward_flops_match_the_torch_flop_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    num_tokens, model = 16, make_model()
    # The counter ignores the matrix products inside fused attention.
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, num_tokens, dtype=torch.int64))
    # A forward pass is one third of training. The counter includes masked attention scores and
    # ignores biases.
    forward_work = dataclasses.replace(
        make_work(model), per_token_of_sequence=2 * make_work(model).per_token_of_sequence
    )
    expected = forward_work.compute_flops([num_tokens], num_tokens) / 3
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)


def test_padding_and_shared_prefixes_are_not_counted() -> None:
    training_work = make_work(make_model())
    num_flops = training_work.compute_flops([30, 10], num_tokens=40)
    assert training_work.compute_flops([30, 10], num_tokens=64) == num_flops
    assert training_work.compute_flops([30, 10], num_tokens=20) == pytest.approx(num_flops / 2)
    assert training_work.compute_flops([], num_tokens=0) == 0


def test_long_sequences_need_more_flops_per_token() -> None:
    training_work = make_work(make_model())
    assert training_work.compute_flops([40], 40) > training_work.compute_flops([20, 20], 40) > 0


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_gpu_peak_flops_are_looked_up_by_name(name: str, teraflops: float | None) -> None:
    expected = None if teraflops is None else teraflops * 1e12
    assert find_gpu_peak_flops(name, torch.bfloat16) == expected


def test_cpu_peak_flops_are_measured() -> None:
    torch.set_num_threads(1)
    peak_flops = measure_peak_flops(CPU, torch.float32)
    assert peak_flops is not None
    assert 1e9 < peak_flops < 1e13


def test_peak_scales_with_the_number_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ludus.trainer.learner.step_metrics.measure_peak_flops", lambda device, dtype: 5e9
    )
    assert [make_work(make_model(), num_devices=n).peak_flops for n in (1, 4)] == [5e9, 20e9]

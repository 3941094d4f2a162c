"""The arguments with which vLLM starts on a GPU, with a fake GPU and a fake vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludus.proto.config import VllmGenerator
from ludus.proto.errors import ConfigError
from ludus.trainer.rollout.engines import vllm_process
from ludus.trainer.rollout.engines.vllm_process import (
    MULTIPROCESSING_VARIABLE,
    check_vllm_build,
    is_vllm_installed,
    make_vllm_variables,
)

GIB = 2**30
TOTAL_BYTES = 80 * GIB


class StartedError(Exception):
    """The fake vLLM has received its arguments."""


def collect_arguments(
    monkeypatch: pytest.MonkeyPatch, free_gib: float, device: str = "cuda", **settings: object
) -> dict[str, Any]:
    """Return the arguments that vLLM receives on a GPU with this free memory.

    Like vLLM 0.32, the fake vLLM refuses to start if less memory is free than the requested share.
    """
    pytest.importorskip("vllm")
    from ludus.trainer.rollout.engines import vllm_engine

    arguments: dict[str, Any] = {}

    def start(_: object) -> None:
        share = arguments.get("gpu_memory_utilization", 0.0)
        if free_gib * GIB < share * TOTAL_BYTES:
            raise ValueError("Free memory on device cuda:0 is less than desired")
        raise StartedError

    monkeypatch.setenv(MULTIPROCESSING_VARIABLE, "0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free_gib * GIB), TOTAL_BYTES))
    monkeypatch.setattr(vllm_engine, "check_vllm_build", lambda **_: None)
    monkeypatch.setattr(vllm_engine, "choose_device", torch.device)
    monkeypatch.setattr(vllm_engine, "EngineArgs", arguments.update)
    monkeypatch.setattr(vllm_engine, "LLMEngine", type("Engine", (), {"from_engine_args": start}))
    with pytest.raises(StartedError):
        vllm_engine.VllmEngine(
            "model",
            VllmGenerator.model_validate(settings),
            end_token_ids=[1],
            max_tokens=64,
            dtype="bfloat16",
            device=torch.device(device),
        )
    return arguments


needs_vllm = pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")


@needs_vllm
@pytest.mark.slow
def test_vllm_measures_its_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = collect_arguments(monkeypatch, free_gib=50)
    assert arguments["gpu_memory_utilization"] == 0.5
    assert "kv_cache_memory_bytes" not in arguments


@needs_vllm
@pytest.mark.slow
def test_too_little_free_memory_is_reported_before_vllm_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"leave 30\.0 of 80\.0 GiB; set it to at most 0\.37"):
        collect_arguments(monkeypatch, free_gib=30)


@needs_vllm
@pytest.mark.slow
def test_fixed_cache_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = collect_arguments(monkeypatch, free_gib=30, kv_cache_gib=8)
    assert arguments["kv_cache_memory_bytes"] == 8 * GIB


@needs_vllm
@pytest.mark.slow
def test_cpu_gets_a_small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = collect_arguments(monkeypatch, free_gib=0, device="cpu")
    assert arguments["kv_cache_memory_bytes"] == GIB


@pytest.mark.parametrize(
    ("is_cpu_build", "has_gpu", "message"),
    [
        (False, False, "needs a GPU; set rollout.num_gpus_per_worker = 1"),
        (True, True, "computes on the CPU only.*num_gpus_per_worker = 0"),
        (False, True, None),
        (True, False, None),
    ],
)
def test_build_of_vllm_must_match_the_device(
    monkeypatch: pytest.MonkeyPatch, is_cpu_build: bool, has_gpu: bool, message: str | None
) -> None:
    monkeypatch.setattr(vllm_process, "version", lambda _: "0.32.0+cpu" if is_cpu_build else "0.32")
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    if message is None:
        check_vllm_build(has_gpu=has_gpu)
        return
    with pytest.raises(ConfigError, match=message):
        check_vllm_build(has_gpu=has_gpu)


def test_attention_in_float32_does_not_use_tf32() -> None:
    assert make_vllm_variables(1, uses_gpu=True)["TRITON_F32_DEFAULT"] == "ieee"

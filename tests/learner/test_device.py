"""Selection of a GPU by each rank, before the rank joins the process group."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from ludus.proto.config import LanguageModelRun, RayWeightStore
from ludus.proto.errors import ConfigError
from ludus.trainer.actors import learner as learner_actor
from ludus.trainer.actors.learner import LearnerActor
from ludus.trainer.learner.process_group import select_device


class FakeCuda:
    """A fake of torch.cuda in a process with `num_gpus` visible GPUs."""

    def __init__(self, num_gpus: int) -> None:
        self.num_gpus = num_gpus
        self.current_device: int | None = None

    def is_available(self) -> bool:
        return self.num_gpus > 0

    def device_count(self) -> int:
        return self.num_gpus

    def is_initialized(self) -> bool:
        return self.current_device is not None

    def set_device(self, device: torch.device | int) -> None:
        index = device if isinstance(device, int) else device.index
        assert index is not None
        if index >= self.num_gpus:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.current_device = index


def replace_cuda(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> FakeCuda:
    """Replace functions of torch.cuda with a fake that has `num_gpus` visible GPUs."""
    cuda = FakeCuda(num_gpus)
    for name in ("is_available", "device_count", "is_initialized", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


@pytest.mark.parametrize("num_gpus", [0.5, 1.0])
def test_rank_with_a_gpu_selects_the_gpu_that_ray_shows(
    monkeypatch: pytest.MonkeyPatch, num_gpus: float
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    cuda = replace_cuda(monkeypatch, 1)
    assert select_device(num_gpus) == torch.device("cuda", 0)
    assert cuda.current_device == 0
    assert "LOCAL_RANK" not in os.environ


def test_rank_without_a_configured_gpu_uses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = replace_cuda(monkeypatch, 2)
    assert select_device(0) == torch.device("cpu")
    assert cuda.current_device is None


def test_configured_gpu_that_torch_cannot_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_cuda(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"num_gpus_per_rank = 1, but .* set .* = 0"):
        select_device(1)


def test_second_rank_joins_process_group_with_the_only_visible_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = replace_cuda(monkeypatch, 1)
    calls: list[tuple[object, object, int | None]] = []

    def record_call(backend: str, *, device_id: torch.device | None = None, **_: object) -> None:
        calls.append((backend, device_id, cuda.current_device))

    monkeypatch.setattr(learner_actor.dist, "init_process_group", record_call)
    monkeypatch.setattr(learner_actor, "Learner", lambda run, path: init_device_mesh("cuda", (1,)))
    monkeypatch.setattr(learner_actor, "freeze_heap", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    learner = {"num_ranks": 2, "num_threads": 1, "num_gpus_per_rank": 1}
    run = LanguageModelRun.model_validate({"learner": learner})
    LearnerActor(1, run, functions={}).start("tcp://127.0.0.1:1", "model", RayWeightStore())
    assert calls == [("nccl", torch.device("cuda", 0), 0)]
    assert cuda.current_device == 0

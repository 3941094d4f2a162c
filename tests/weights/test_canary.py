"""The canary sings when a worker samples from other weights than those published."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ludus.trainer.types import WeightManifest
from ludus.trainer.weights import (
    CanaryReport,
    WorkerWeights,
    cast_floats,
    check_canary,
    make_manifest,
)
from tests.rollout.engine_pair import (
    CANARY_PROMPT,
    EngineKind,
    EnginePair,
    full_logprobs,
    open_pair,
)

LOGPROBS = [-1.5, -0.25, -4.0]


def manifest_of(state: dict[str, torch.Tensor], logprobs: Sequence[float]) -> WeightManifest:
    return make_manifest(8, state, CANARY_PROMPT, list(logprobs))


def report_of(answer: Sequence[float], dtype: str = "float32") -> CanaryReport:
    return check_canary(manifest_of({"w": torch.ones(2)}, LOGPROBS), answer, dtype)


def test_the_learners_own_answer_passes() -> None:
    report = report_of(LOGPROBS)
    assert report.ok
    assert report.error == 0.0
    assert report.version == 8


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_largest_difference_decides(dtype: str, allowed: float, position: int) -> None:
    within, beyond = list(LOGPROBS), list(LOGPROBS)
    within[position] += 0.9 * allowed
    beyond[position] -= 1.1 * allowed
    assert report_of(within, dtype).ok
    report = report_of(beyond, dtype)
    assert not report.ok
    assert report.error == pytest.approx(1.1 * allowed)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_logprob_that_is_no_number_never_passes(position: int, value: float) -> None:
    answer = list(LOGPROBS)
    answer[position] = value
    assert not report_of(answer).ok


def test_weights_that_travel_in_a_coarser_type_may_differ_by_what_it_cannot_hold() -> None:
    state = cast_floats({"w": torch.ones(2), "count": torch.arange(3)}, "bfloat16")
    answer = [LOGPROBS[0] + 0.05, *LOGPROBS[1:]]
    assert check_canary(manifest_of(state, LOGPROBS), answer, "float32").ok
    assert not report_of(answer).ok


def test_what_a_worker_holds_can_be_read_off() -> None:
    held = WorkerWeights(report_of([-1.5, -0.75, -4.0]), 0.25, 0.5, bytes_fetched=8)
    assert (held.version, held.canary_error, held.ok) == (8, 0.5, False)
    assert held.content_hash == manifest_of({"w": torch.ones(2)}, LOGPROBS).content_hash
    assert "does not sample from the published weights" in str(held)


def test_an_answer_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        report_of(LOGPROBS[:2])


def test_a_failure_names_version_hash_and_size() -> None:
    report = report_of([-1.5, -0.75, -4.0])
    assert "version 8" in str(report)
    assert report.content_hash[:12] in str(report)
    assert "0.5" in str(report)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tied_embeddings_that_stay_stale_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_pair(EngineKind("vllm", tie_embeddings=True), tmp_path) as pair:
        assert canary_after_sync(pair, seed=1).error < 1e-4
        with monkeypatch.context() as patch:
            # Without these two, vLLM is as it comes: it keeps the old output layer and is silent.
            patch.setattr(pair.engine, "_tied_names", {})
            patch.setattr(pair.engine, "_refuse_stale_layers", lambda names: None)
            stale = canary_after_sync(pair, seed=2)
        assert not stale.ok
        assert stale.error > 0.1
        assert canary_after_sync(pair, seed=3).error < 1e-4


def canary_after_sync(pair: EnginePair, seed: int) -> CanaryReport:
    """What the canary says once the engine was handed weights that moved."""
    pair.sync(seed)
    expected = full_logprobs(pair.model, CANARY_PROMPT.prompt_ids, CANARY_PROMPT.completion_ids)
    state = {name: tensor.detach() for name, tensor in pair.model.named_parameters()}
    return check_canary(manifest_of(state, expected), pair.engine.score(CANARY_PROMPT), "float32")

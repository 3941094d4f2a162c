"""Tests of the vLLM engine: seeds, in-flight weight updates, tied embeddings, and isolation."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.proto.errors import WeightSyncError
from ludus.trainer.core.interfaces import EngineOutput, EngineRequest
from ludus.trainer.core.types import Sampling
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.engines.vllm_process import is_vllm_installed
from tests.rollout.engine_pair import (
    CANARY_PROMPT,
    TOLERANCE,
    VLLM,
    EnginePair,
    UnclosableEngine,
    add_noise,
    complete,
    compute_logprobs,
    compute_max_error,
    drain,
    make_folder,
    make_requests,
)

ROOT = Path(__file__).parents[2]
UNTIED, TIED = VLLM

with_both_models = pytest.mark.parametrize("pair", VLLM, indirect=True, ids=str)
with_untied_model = pytest.mark.parametrize("pair", [UNTIED], indirect=True, ids=str)
with_tied_model = pytest.mark.parametrize("pair", [TIED], indirect=True, ids=str)


@with_untied_model
def test_completion_does_not_depend_on_the_batch(pair: EnginePair) -> None:
    requests = make_requests(100)
    expected = complete(pair.engine, requests)
    assert get_token_ids(complete(pair.engine, reversed(requests))) == get_token_ids(expected)
    staggered_outputs: dict[int, EngineOutput] = {}
    for request in requests:
        pair.engine.submit(request)
        staggered_outputs |= {output.request_id: output for output in pair.engine.step()}
    staggered_outputs |= drain(pair.engine)
    assert get_token_ids(staggered_outputs) == get_token_ids(expected)
    for request in requests[:5]:
        outputs = complete(pair.engine, [request])
        assert outputs[request.request_id].token_ids == expected[request.request_id].token_ids


@with_untied_model
def test_equal_requests_with_different_seeds_get_different_completions(pair: EnginePair) -> None:
    requests = [EngineRequest(i, [8, 60, 33], Sampling(1.0, 4), seed=i) for i in range(50)]
    assert len(set(map(tuple, get_token_ids(complete(pair.engine, requests)).values()))) > 10


@with_both_models
def test_weights_loaded_during_generation_are_used_for_all_later_tokens(pair: EnginePair) -> None:
    requests = make_requests(60, max_tokens=20)
    for request in requests:
        pair.engine.submit(request)
    num_tokens_before_sync = 6
    outputs: dict[int, EngineOutput] = {}
    for _ in range(num_tokens_before_sync):
        outputs |= {output.request_id: output for output in pair.engine.step()}
    pair.sync(seed=11)
    outputs |= drain(pair.engine)
    assert outputs.keys() == {request.request_id for request in requests}
    errors_before_sync, errors_after_sync = [], []
    for request in requests:
        output = outputs[request.request_id]
        expected = compute_logprobs(pair.model, request.prompt_ids, output.token_ids)
        errors = [abs(a - b) for a, b in zip(output.logprobs, expected, strict=True)]
        errors_before_sync += errors[:num_tokens_before_sync]
        errors_after_sync += errors[num_tokens_before_sync:]
    assert max(errors_before_sync) > 0.1, "tokens before the sync were sampled with the new weights"
    assert max(errors_after_sync) < TOLERANCE


@with_tied_model
def test_stale_tied_layer_is_reported(pair: EnginePair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pair.engine, "_tied_names", {})
        with pytest.raises(WeightSyncError, match="lm_head"):
            pair.sync(seed=12)
    pair.sync(seed=13)
    requests = make_requests(8)
    assert compute_max_error(pair.model, requests, complete(pair.engine, requests)) < TOLERANCE


@with_both_models
def test_missing_or_unknown_tensor_is_rejected(pair: EnginePair) -> None:
    previous_score = pair.engine.score(CANARY_PROMPT)
    parameters = dict(pair.model.named_parameters())
    incomplete_parameters = {
        name: tensor for name, tensor in parameters.items() if "layers.1.self_attn.k" not in name
    }
    with pytest.raises(WeightSyncError, match=r"layers\.1\.self_attn\.k_proj"):
        pair.engine.load_weights(incomplete_parameters)
    with pytest.raises(WeightSyncError, match=r"model\.extra"):
        pair.engine.load_weights({**parameters, "model.extra": parameters["model.norm.weight"]})
    assert pair.engine.score(CANARY_PROMPT) == previous_score


@with_untied_model
async def test_async_engine_generates_scores_and_loads_weights_with_vllm(pair: EnginePair) -> None:
    generator = AsyncEngine(UnclosableEngine(pair.engine))
    try:
        requests = make_requests(40)
        tasks = [asyncio.create_task(generator(r.prompt_ids, r.sampling, r.seed)) for r in requests]
        add_noise(pair.model, seed=14, scale=0.05)
        await generator.load_weights(dict(pair.model.named_parameters()), version=1)
        [score] = await generator.score([CANARY_PROMPT])
        completions = await asyncio.gather(*tasks)
        final_completion = await generator(requests[0].prompt_ids, requests[0].sampling, seed=0)
    finally:
        generator.close()
    assert score == pytest.approx(
        compute_logprobs(pair.model, CANARY_PROMPT.prompt_ids, CANARY_PROMPT.completion_ids),
        abs=TOLERANCE,
    )
    assert len(completions) == 40
    expected = compute_logprobs(pair.model, requests[0].prompt_ids, final_completion.token_ids)
    assert final_completion.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert final_completion.policy_version == 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_separate_process_prints_no_output_and_opens_no_connection(tmp_path: Path) -> None:
    if not is_vllm_installed():
        pytest.skip("vLLM is not installed")
    model_path = make_folder(tmp_path / "model", tie_embeddings=True)
    command = [sys.executable, "-m", "tests.rollout.vllm_program", model_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["connections"] == []
    assert report["has_preload"] is False
    assert report["num_threads_after"] == 2, "torch.set_num_threads has no effect after startup"
    first_ids, repeated_ids, different_ids = report["answers"]
    assert first_ids == repeated_ids, "equal seeds gave different completions"
    assert first_ids != different_ids, "different seeds gave equal completions"
    assert report["refused"] == ["ConfigError", "ConfigError"]


def get_token_ids(outputs: dict[int, EngineOutput]) -> dict[int, list[int]]:
    """Return the sampled token ids by request id."""
    return {request_id: output.token_ids for request_id, output in outputs.items()}

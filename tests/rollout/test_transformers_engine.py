"""Tests of the transformers engine: batches by prompt length, shared prompts, and seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ludus.trainer.core.interfaces import EngineRequest
from ludus.trainer.core.types import Sampling
from tests.rollout.engine_pair import complete, make_folder, make_transformers_engine

pytestmark = pytest.mark.slow

SHARED_PROMPTS = [[8, 60, 33], [9, 14, 77], [8, 60, 33], [8, 60, 33], [41, 5, 6], [9, 14, 77]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_folder(tmp_path_factory.mktemp("model"), tie_embeddings=False)


def test_shared_prompts_do_not_change_completions(model_path: str) -> None:
    requests = [
        EngineRequest(i, prompt, Sampling(0.0, 2 + i), seed=i)
        for i, prompt in enumerate(SHARED_PROMPTS)
    ]
    engine = make_transformers_engine(model_path)
    outputs = complete(engine, requests)
    for request in requests:
        output = complete(engine, [request])[request.request_id]
        assert outputs[request.request_id].token_ids == output.token_ids
        assert outputs[request.request_id].logprobs == pytest.approx(output.logprobs, abs=1e-5)


def test_equal_prompts_are_prefilled_once(model_path: str) -> None:
    engine = make_transformers_engine(model_path)
    batch_sizes: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda _, __, kwargs: batch_sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    requests = [
        EngineRequest(i, prompt, Sampling(1.0, 2), seed=i)
        for i, prompt in enumerate(SHARED_PROMPTS)
    ]
    complete(engine, requests)
    assert batch_sizes == [3, 6]  # three distinct prompts, then six sequences


def test_equal_prompts_are_sampled_independently(model_path: str) -> None:
    requests = [EngineRequest(i, [8, 60, 33], Sampling(1.0, 4), seed=i) for i in range(50)]
    outputs = complete(make_transformers_engine(model_path), requests)
    assert len({tuple(output.token_ids) for output in outputs.values()}) > 10


def test_step_completes_all_requests_as_long_as_the_oldest(model_path: str) -> None:
    engine = make_transformers_engine(model_path)
    for i, prompt in enumerate([[6, 7], [5], [8, 9], [1, 2, 3]]):
        engine.submit(EngineRequest(i, prompt, Sampling(1.0, 3), seed=i))
    assert {output.request_id for output in engine.step()} == {0, 2}
    assert engine.has_work


def test_rare_prompt_length_is_not_starved_by_frequent_lengths(model_path: str) -> None:
    engine = make_transformers_engine(model_path, max_batch_size=2)
    engine.submit(EngineRequest(0, [1, 2, 3], Sampling(1.0, 1), seed=0))
    completed_ids = []
    for step in range(3):
        for i in range(4):
            engine.submit(EngineRequest(4 * step + i + 1, [5, 6], Sampling(1.0, 1), seed=i))
        completed_ids += [output.request_id for output in engine.step()]
    assert completed_ids[0] == 0
    engine.submit(EngineRequest(99, [1, 2, 3], Sampling(1.0, 1), seed=0))
    later_ids = [output.request_id for _ in range(2) for output in engine.step()]
    assert 99 in later_ids, "requests of another length starved request 99"


def test_batch_size_is_limited(model_path: str) -> None:
    engine = make_transformers_engine(model_path, max_batch_size=2)
    for i in range(5):
        engine.submit(EngineRequest(i, [5, 6 + i], Sampling(1.0, 3), seed=i))
    batch_sizes = []
    while engine.has_work:
        batch_sizes.append(len(engine.step()))
    assert batch_sizes == [2, 2, 1]


def test_unknown_tensor_is_rejected(model_path: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no_such_layer"):
        make_transformers_engine(model_path).load_weights({"no_such_layer": torch.zeros(1)})

"""Tests of the transformers engine: its batch, shared prompts, known prompts and new weights."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

from ludus.trainer.core.answer_trie import AnswerTrie
from ludus.trainer.core.interfaces import Engine, EngineOutput, EngineRequest
from ludus.trainer.core.types import Sampling
from ludus.trainer.rollout.engines.key_values import KeyValueRows
from tests.rollout.engine_pair import (
    add_noise,
    complete,
    compute_logprobs,
    drain,
    make_folder,
    make_transformers_engine,
)

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
    batch_shapes = record_shapes(engine)
    requests = [
        EngineRequest(i, prompt, Sampling(1.0, 2), seed=i)
        for i, prompt in enumerate(SHARED_PROMPTS)
    ]
    complete(engine, requests)
    assert batch_shapes == [(3, 3), (6, 1)]  # three distinct prompts, then six sequences


def test_equal_sequences_are_computed_once_until_they_differ(model_path: str) -> None:
    engine = make_transformers_engine(model_path)
    shapes = record_shapes(engine)
    temperatures = [0.0, 0.0, 0.0, 5.0, 5.0]
    requests = [
        EngineRequest(i, [8, 60, 33], Sampling(temperature, 6), seed=i)
        for i, temperature in enumerate(temperatures)
    ]
    outputs = complete(engine, requests)
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 3
    assert shapes == [(1, 3), *[(3, 1)] * 5]
    for request in requests:
        expected = complete(make_transformers_engine(model_path), [request])[request.request_id]
        assert outputs[request.request_id].token_ids == expected.token_ids
        assert outputs[request.request_id].logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_sequences_that_branch_and_end_at_any_time_equal_single_ones(model_path: str) -> None:
    """Few legal answers make sequences equal often; limits and lengths make them end apart."""
    rng = random.Random(0)
    answers = AnswerTrie([[*rng.choices(range(3, 6), k=9), 1] for _ in range(60)])
    prompts = [[8, 60, 33], [8, 60, 33, 7], list(range(3, 40))]
    requests = [
        EngineRequest(
            i, prompts[i % 3], Sampling(1.0, rng.randrange(2, 11)), seed=i, answers=answers
        )
        for i in range(60)
    ]
    engine = make_transformers_engine(model_path)
    outputs: dict[int, EngineOutput] = {}
    for request in requests:
        engine.submit(request)
        if rng.random() < 0.4:
            outputs |= {output.request_id: output for output in engine.step()}
    outputs |= drain(engine)
    for request in requests:
        expected = complete(make_transformers_engine(model_path), [request])[request.request_id]
        assert outputs[request.request_id].token_ids == expected.token_ids
        assert outputs[request.request_id].logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_last_legal_answer_needs_no_further_pass(model_path: str) -> None:
    engine = make_transformers_engine(model_path)
    shapes = record_shapes(engine)
    answers = AnswerTrie([[20, 30, 40, 1], [21, 31, 1]])
    prompt = list(range(3, 40))
    request = EngineRequest(0, prompt, Sampling(1.0, 4), seed=0, answers=answers)
    output = complete(engine, [request])[0]
    assert output.token_ids in ([20, 30, 40, 1], [21, 31, 1])
    assert output.logprobs[0] < 0
    assert output.logprobs[1:] == [0.0] * (len(output.token_ids) - 1)
    assert output.has_end_token
    assert len(shapes) == 1
    next_request = EngineRequest(1, [*prompt, *output.token_ids, 8], Sampling(1.0, 6), seed=1)
    next_output = complete(engine, [next_request])[1]
    expected = complete(make_transformers_engine(model_path), [next_request])[1]
    assert next_output.token_ids == expected.token_ids
    assert next_output.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert shapes[1][1] < 16  # the prompt is not computed again


def test_legal_answer_ends_at_the_limit_of_tokens(model_path: str) -> None:
    answers = AnswerTrie([[20, 30, 40, 1], [21, 31, 1]])
    request = EngineRequest(0, [3, 4], Sampling(0.0, 2), seed=0, answers=answers)
    output = complete(make_transformers_engine(model_path), [request])[0]
    assert output.token_ids in ([20, 30], [21, 31])
    assert not output.has_end_token


def test_equal_prompts_are_sampled_independently(model_path: str) -> None:
    requests = [EngineRequest(i, [8, 60, 33], Sampling(1.0, 4), seed=i) for i in range(50)]
    outputs = complete(make_transformers_engine(model_path), requests)
    assert len({tuple(output.token_ids) for output in outputs.values()}) > 10


def test_requests_of_any_length_share_the_batch(model_path: str) -> None:
    engine = make_transformers_engine(model_path)
    batch_sizes = record_shapes(engine)
    for i, prompt in enumerate([[6, 7], [5], [8, 9], [1, 2, 3]]):
        engine.submit(EngineRequest(i, prompt, Sampling(0.0, 3), seed=i))
    engine.step()
    engine.submit(EngineRequest(4, [3, 4, 5, 6, 7], Sampling(0.0, 2), seed=4))
    assert drain(engine).keys() == {0, 1, 2, 3, 4}
    assert batch_sizes == [(4, 3), (4, 1), (1, 5), (5, 1)]


def test_completed_requests_leave_the_batch(model_path: str) -> None:
    engine = make_transformers_engine(model_path)
    requests = [EngineRequest(i, [9, 14 + i], Sampling(0.0, 1 + i), seed=i) for i in range(4)]
    expected = {request.request_id: complete(engine, [request]) for request in requests}
    batch_sizes = record_shapes(engine)
    outputs = complete(engine, requests)
    assert batch_sizes == [(4, 2), (3, 1), (2, 1), (1, 1)]
    for request_id, output in outputs.items():
        assert output.token_ids == expected[request_id][request_id].token_ids


def test_few_requests_wait_a_limited_number_of_steps(model_path: str) -> None:
    engine = make_transformers_engine(model_path)
    for i in range(40):
        engine.submit(EngineRequest(i, [5, 6, 7], Sampling(1.0, 100), seed=i))
    engine.step()
    engine.submit(EngineRequest(99, [1, 2], Sampling(1.0, 1), seed=0))
    outputs = [output.request_id for _ in range(8) for output in engine.step()]
    assert 99 in outputs


def test_batch_size_is_limited(model_path: str) -> None:
    engine = make_transformers_engine(model_path, max_batch_size=2)
    batch_sizes = record_shapes(engine)
    requests = [EngineRequest(i, [5, 6 + i], Sampling(1.0, 3), seed=i) for i in range(5)]
    assert len(complete(engine, requests)) == 5
    assert max(num_rows for num_rows, _ in batch_sizes) == 2


def test_memory_of_the_batch_is_limited(model_path: str) -> None:
    """Sequences of 20,000 tokens take 20 MB each, so that two of them fit in 50 MiB."""
    engine = make_transformers_engine(model_path, kv_cache_mib=50)
    batch_sizes = record_shapes(engine)
    long = [EngineRequest(i, [5, 6 + i], Sampling(1.0, 20_000), seed=i) for i in range(4)]
    short = [EngineRequest(9, [7, 8], Sampling(1.0, 2), seed=9)]
    for request in [*long, *short]:
        engine.submit(request)
    finished = [output.request_id for _ in range(50) for output in engine.step()]
    engine.abort(set(range(4)))
    assert finished == []  # the short request does not overtake the waiting long ones
    assert max(num_rows for num_rows, _ in batch_sizes) == 2
    assert [output.request_id for output in drain(engine).values()] == [9]


def count_batches() -> int:
    """Return the number of batches of keys and values in memory."""
    return sum(type(item) is KeyValueRows for item in gc.get_objects())


def test_memory_is_free_without_the_garbage_collector(model_path: str) -> None:
    engine = make_transformers_engine(model_path)
    gc.collect()
    gc.disable()
    num_before = count_batches()
    try:
        for number in range(8):
            ids = [5, 6 + number]
            complete(engine, [EngineRequest(number, ids, Sampling(1.0, 3), seed=number)])
        assert count_batches() == num_before
    finally:
        gc.enable()


def test_request_larger_than_the_limit_runs_alone(model_path: str) -> None:
    engine = make_transformers_engine(model_path, kv_cache_mib=1)
    requests = [EngineRequest(i, [5, 6], Sampling(1.0, 2000), seed=i) for i in range(2)]
    batch_sizes = record_shapes(engine)
    for request in requests:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    assert batch_sizes == [(1, 2), *[(1, 1)] * 4]


def test_shared_instructions_are_computed_once(model_path: str) -> None:
    instructions = list(range(3, 43))
    prompts = [[*instructions, 50 + i, 60 + i] for i in range(6)]
    requests = [EngineRequest(i, ids, Sampling(1.0, 3), seed=i) for i, ids in enumerate(prompts)]
    engine = make_transformers_engine(model_path)
    shapes = record_shapes(engine)
    outputs = complete(engine, requests)
    assert shapes[:2] == [(1, 32), (6, 10)]  # two blocks of 16 tokens, then the remaining tokens
    for request in requests:
        expected = complete(make_transformers_engine(model_path), [request])[request.request_id]
        assert outputs[request.request_id].token_ids == expected.token_ids
        assert outputs[request.request_id].logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_next_turn_computes_only_new_tokens(model_path: str) -> None:
    prompt = list(range(3, 40))
    engine, empty_engine = (make_transformers_engine(model_path) for _ in range(2))
    first = complete(engine, [EngineRequest(0, prompt, Sampling(1.0, 6), seed=0)])[0]
    request = EngineRequest(1, [*prompt, *first.token_ids, 8, 9], Sampling(1.0, 6), seed=1)
    shapes = record_shapes(engine)
    second = complete(engine, [request])[1]
    expected = complete(empty_engine, [request])[1]
    assert shapes[0][1] < 16
    assert second.token_ids == expected.token_ids
    assert second.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_new_weights_apply_to_running_requests_and_known_prompts(model_path: str) -> None:
    engine, other_engine = (make_transformers_engine(model_path) for _ in range(2))
    add_noise(other_engine.model, seed=3, scale=0.1)
    weights = dict(other_engine.model.named_parameters())
    prompts = [list(range(3, 23 + i)) for i in range(3)]
    requests = [EngineRequest(i, ids, Sampling(1.0, 20), seed=i) for i, ids in enumerate(prompts)]
    complete(engine, requests)  # stores the prompts
    for request in requests:
        engine.submit(request)
    for _ in range(4):
        assert not engine.step()
    engine.load_weights(weights)
    for request_id, output in drain(engine).items():
        ids = prompts[request_id] + output.token_ids[:4]
        expected = compute_logprobs(other_engine.model, ids, output.token_ids[4:])
        assert output.logprobs[4:] == pytest.approx(expected, abs=1e-5)


def record_shapes(engine: Engine) -> list[tuple[int, ...]]:
    """Return a list that receives the shape of the tokens of each pass through the model."""
    shapes: list[tuple[int, ...]] = []
    engine.model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def test_unknown_tensor_is_rejected(model_path: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no_such_layer"):
        make_transformers_engine(model_path).load_weights({"no_such_layer": torch.zeros(1)})

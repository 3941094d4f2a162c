"""Tests of every engine against a full forward pass without a cache."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from ludus.trainer.core.answer_trie import AnswerTrie
from ludus.trainer.core.interfaces import EngineOutput, EngineRequest
from ludus.trainer.core.types import Sampling, ScoringRequest
from ludus.trainer.learner.micro_batches import make_unscored_sample, pack_one_micro_batch
from ludus.trainer.learner.model import PolicyModel
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from tests.rollout.engine_pair import (
    CANARY_PROMPT,
    END_TOKEN_ID,
    TOLERANCE,
    TRANSFORMERS,
    VLLM,
    EnginePair,
    UnclosableEngine,
    complete,
    compute_logprobs,
    compute_max_error,
    drain,
    make_requests,
)

MAX_CHI_SQUARE = 27.88
"""The 99.9th percentile of chi-square with nine degrees of freedom."""
END = END_TOKEN_ID
ANSWERS = (
    [(7, END), (7, 30, END), (7, 30, 12, 9, END), (40, 41, 42, END)],
    [(55, 56, END)],
    [(token_id, 60, END) for token_id in range(70, 200)],
)
"""Answers of which one continues another, a single answer, and many answers."""

with_answers = pytest.mark.parametrize("pair", [TRANSFORMERS[0], VLLM[0]], indirect=True, ids=str)


@pytest.mark.slow
def test_greedy_completions_equal_a_loop_without_cache(pair: EnginePair) -> None:
    requests = make_requests(12, temperature=0.0)
    outputs = complete(pair.engine, requests)
    for request in requests:
        assert outputs[request.request_id].token_ids == decode_greedily(pair, request)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_logprobs_equal_a_full_forward_pass(pair: EnginePair, temperature: float) -> None:
    requests = make_requests(40, temperature=temperature)
    outputs = complete(pair.engine, requests)
    assert compute_max_error(pair.model, requests, outputs) < TOLERANCE


@pytest.mark.slow
def test_greedy_and_sampled_requests_share_a_batch(pair: EnginePair) -> None:
    prompt = [8, 60, 33, 21]
    requests = [EngineRequest(i, prompt, Sampling(float(i % 2), 6), seed=i) for i in range(40)]
    outputs = complete(pair.engine, requests)
    greedy_outputs = {tuple(outputs[i].token_ids) for i in range(0, 40, 2)}
    sampled_outputs = {tuple(outputs[i].token_ids) for i in range(1, 40, 2)}
    assert greedy_outputs == {tuple(decode_greedily(pair, requests[0]))}
    assert len(sampled_outputs) > 10
    assert compute_max_error(pair.model, requests, outputs) < TOLERANCE


@pytest.mark.slow
def test_completion_ends_with_the_end_token_or_at_the_limit(pair: EnginePair) -> None:
    requests = make_requests(150, max_tokens=40)
    outputs = complete(pair.engine, requests).values()
    assert {output.has_end_token for output in outputs} == {True, False}
    for output in outputs:
        assert (output.token_ids[-1] == END_TOKEN_ID) is output.has_end_token
        assert END_TOKEN_ID not in output.token_ids[:-1]
        assert output.has_end_token or len(output.token_ids) == 40
        assert len(output.logprobs) == len(output.token_ids)


@pytest.mark.slow
def test_engine_has_work_until_all_requests_are_complete(pair: EnginePair) -> None:
    requests = make_requests(30)
    assert not pair.engine.has_work
    pair.engine.submit(requests[0])
    assert pair.engine.has_work
    outputs = complete(pair.engine, requests[1:])
    assert outputs.keys() == {request.request_id for request in requests}
    assert not pair.engine.has_work


@pytest.mark.slow
def test_aborted_request_gets_no_output_and_leaves_no_work(pair: EnginePair) -> None:
    for i in range(4):
        pair.engine.submit(EngineRequest(i, [7, 8, 9 + i], Sampling(0.0, 2), seed=i))
    pair.engine.abort([1, 2, 99])
    completed_ids = set()
    while pair.engine.has_work:
        completed_ids |= {output.request_id for output in pair.engine.step()}
    assert completed_ids == {0, 3}
    pair.engine.submit(EngineRequest(4, [7, 8], Sampling(0.0, 2), seed=0))
    pair.engine.abort([4])
    assert not pair.engine.has_work


def test_requests_in_the_batch_continue_when_another_one_is_aborted(pair: EnginePair) -> None:
    requests = [EngineRequest(i, [7, 8, 9 + i], Sampling(0.0, 4), seed=i) for i in range(4)]
    for request in requests:
        pair.engine.submit(request)
    outputs = {output.request_id: output for output in pair.engine.step()}
    pair.engine.abort([0, 2])
    while pair.engine.has_work:
        outputs |= {output.request_id: output for output in pair.engine.step()}
    assert outputs.keys() == {1, 3}
    for i, output in outputs.items():
        assert output.token_ids == decode_greedily(pair, requests[i])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_frequencies_follow_the_softmax(pair: EnginePair, temperature: float) -> None:
    prompt, num_samples = [8, 60, 33, 21], 3000
    requests = [
        EngineRequest(i, prompt, Sampling(temperature, 1), seed=i) for i in range(num_samples)
    ]
    outputs = complete(pair.engine, requests)
    counts = Counter(output.token_ids[0] for output in outputs.values())
    with torch.no_grad():
        logits = pair.model(torch.tensor([prompt])).logits[0, -1]
    top_tokens = torch.softmax(logits / temperature, dim=-1).topk(9)
    expected_counts = [probability * num_samples for probability in top_tokens.values.tolist()]
    actual_counts = [counts[token_id] for token_id in top_tokens.indices.tolist()]
    # All remaining tokens together form the tenth class.
    expected_counts.append(num_samples - sum(expected_counts))
    actual_counts.append(num_samples - sum(actual_counts))
    assert min(expected_counts) > 5
    pairs = zip(actual_counts, expected_counts, strict=True)
    chi_square = sum((actual - expected) ** 2 / expected for actual, expected in pairs)
    assert chi_square < MAX_CHI_SQUARE


@pytest.mark.slow
def test_loaded_weights_are_used_for_sampling_and_scoring(pair: EnginePair) -> None:
    requests = make_requests(20)
    previous_score = pair.engine.score(CANARY_PROMPT)
    for seed in range(3):
        pair.sync(seed)
        score = pair.engine.score(CANARY_PROMPT)
        assert score == pytest.approx(score_canary(pair, CANARY_PROMPT), abs=TOLERANCE)
        assert score != pytest.approx(previous_score, abs=0.01)
        previous_score = score
        outputs = complete(pair.engine, requests)
        assert compute_max_error(pair.model, requests, outputs) < TOLERANCE


@pytest.mark.slow
def test_canary_is_scored_while_requests_are_in_flight(pair: EnginePair) -> None:
    requests = make_requests(100)
    for request in requests:
        pair.engine.submit(request)
    outputs = {output.request_id: output for output in pair.engine.step()}
    assert pair.engine.has_work
    assert pair.engine.score(CANARY_PROMPT) == pytest.approx(
        score_canary(pair, CANARY_PROMPT), abs=TOLERANCE
    )
    outputs |= drain(pair.engine)
    assert outputs.keys() == {request.request_id for request in requests}
    assert compute_max_error(pair.model, requests, outputs) < TOLERANCE


@pytest.mark.slow
def test_sampler_and_learner_agree_after_every_sync(pair: EnginePair) -> None:
    temperature = 0.8
    policy = PolicyModel(pair.model)
    requests = make_requests(16, temperature=temperature)
    for seed in range(3):
        pair.sync(seed)
        outputs = complete(pair.engine, requests)
        for request in requests:
            output = outputs[request.request_id]
            token_ids = request.prompt_ids + output.token_ids
            is_sampled = [index >= len(request.prompt_ids) for index in range(len(token_ids))]
            micro_batch = pack_one_micro_batch([make_unscored_sample(token_ids, is_sampled)])
            with torch.no_grad():
                logprobs = micro_batch.gather_samples(
                    policy(micro_batch.rows, temperature).logprobs
                )
            assert logprobs[0].tolist() == pytest.approx(output.logprobs, abs=TOLERANCE)


@pytest.mark.slow
def test_completions_depend_only_on_the_seed(pair: EnginePair) -> None:
    """Vary the batch, the order, the request ids and the earlier requests."""
    requests = make_requests(100)
    expected = map_tokens(requests, complete(pair.engine, requests))
    assert map_tokens(requests, complete(pair.engine, reversed(requests))) == expected
    copies = [replace(request, request_id=request.request_id + 500) for request in requests]
    assert map_tokens(copies, complete(pair.engine, copies)) == expected
    for request in requests[:5]:
        output = complete(pair.engine, [request])[request.request_id]
        assert output.token_ids == expected[request.seed]
    other_requests = make_requests(100, first_seed=1000)
    outputs = complete(pair.engine, other_requests)
    num_equal = sum(
        outputs[request.request_id].token_ids == expected[request.request_id]
        for request in other_requests
    )
    assert num_equal < 20, f"{num_equal} of 100 completions do not depend on the seed"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.5, 2.0])
def test_top_p_samples_most_likely_tokens_with_renormalized_logprobs(
    pair: EnginePair, temperature: float
) -> None:
    prompt, top_p = [8, 60, 33, 21], 0.85
    requests = [
        EngineRequest(i, prompt, Sampling(temperature, 1, top_p), seed=i) for i in range(600)
    ]
    outputs = complete(pair.engine, requests).values()
    with torch.no_grad():
        logits = pair.model(torch.tensor([prompt])).logits[0, -1]
    ranking = torch.softmax(logits / temperature, dim=-1).sort(descending=True)
    num_top_tokens = int((ranking.values.cumsum(0) - ranking.values < top_p).sum())
    probabilities = ranking.values[:num_top_tokens] / ranking.values[:num_top_tokens].sum()
    expected_logprobs = dict(
        zip(ranking.indices.tolist(), probabilities.log().tolist(), strict=False)
    )
    sampled_ids = {output.token_ids[0] for output in outputs}
    assert len(sampled_ids) > 1
    assert sampled_ids <= expected_logprobs.keys()
    for output in outputs:
        assert output.logprobs[0] == pytest.approx(
            expected_logprobs[output.token_ids[0]], abs=TOLERANCE
        )


SAMPLINGS = [
    Sampling(1.5, 4, top_k=5),
    Sampling(1.5, 4, min_p=0.2),
    Sampling(1.2, 4, repetition_penalty=1.6),
    Sampling(1.5, 4, top_p=0.9, top_k=7, min_p=0.05, repetition_penalty=0.7),
]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["top_k", "min_p", "penalty", "all"])
def test_logprobs_match_the_sampled_distribution(pair: EnginePair, sampling: Sampling) -> None:
    requests = [EngineRequest(i, [8, 60, 33, 21], sampling, seed=i) for i in range(120)]
    outputs = complete(pair.engine, requests)
    errors = []
    for request in requests:
        output = outputs[request.request_id]
        expected = compute_filtered_logprobs(pair, request, output.token_ids)
        errors += [abs(a - b) for a, b in zip(output.logprobs, expected, strict=True)]
    assert max(errors) < TOLERANCE
    assert len({output.token_ids[0] for output in outputs.values()}) > 1


def compute_filtered_logprobs(
    pair: EnginePair, request: EngineRequest, output_ids: list[int]
) -> list[float]:
    """Return the completion's log-probs after the repetition penalty and the sampling filters."""
    sampling, ids, logprobs = request.sampling, list(request.prompt_ids), []
    for token_id in output_ids:
        with torch.no_grad():
            logits = pair.model(torch.tensor([ids])).logits[0, -1].tolist()
        for i in set(ids):
            penalty = sampling.repetition_penalty
            logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
        weights = torch.softmax(torch.tensor(logits) / sampling.temperature, dim=0).tolist()
        ranking = sorted(range(len(weights)), key=lambda i: -weights[i])
        ranking = [i for i in ranking if weights[i] >= sampling.min_p * weights[ranking[0]]]
        ranking = ranking[: sampling.top_k or None]
        total_weight, cumulative_share, top_ids = sum(weights[i] for i in ranking), 0.0, []
        for i in ranking:
            if cumulative_share < sampling.top_p:
                top_ids.append(i)
            cumulative_share += weights[i] / total_weight
        top_weights = torch.tensor([weights[i] for i in top_ids])
        logprobs.append((top_weights[top_ids.index(token_id)] / top_weights.sum()).log().item())
        ids.append(token_id)
    return logprobs


@pytest.mark.slow
def test_requests_with_and_without_top_p_share_a_batch(pair: EnginePair) -> None:
    requests = make_requests(30)
    top_p_requests = [
        replace(request, request_id=100 + request.request_id, sampling=Sampling(1.0, 12, 0.3))
        for request in requests
    ]
    expected = map_tokens(requests, complete(pair.engine, requests))
    outputs = complete(pair.engine, [*requests, *top_p_requests])
    assert map_tokens(requests, outputs) == expected
    assert any(
        outputs[request.request_id].token_ids != expected[request.seed]
        for request in top_p_requests
    )


def map_tokens(
    requests: Iterable[EngineRequest], outputs: dict[int, EngineOutput]
) -> dict[int, list[int]]:
    """Return the sampled tokens of each request by its seed."""
    return {request.seed: outputs[request.request_id].token_ids for request in requests}


def score_canary(pair: EnginePair, canary: ScoringRequest) -> list[float]:
    """Return the plain model's log-probs of the canary completion."""
    return compute_logprobs(pair.model, canary.prompt_ids, canary.completion_ids)


@torch.no_grad()
def decode_greedily(pair: EnginePair, request: EngineRequest) -> list[int]:
    """Return the greedy completion of the plain model, with a full forward pass per token."""
    token_ids = list(request.prompt_ids)
    for _ in range(request.sampling.max_tokens):
        logits = pair.model(torch.tensor([token_ids]), use_cache=False).logits
        token_ids.append(int(logits[0, -1].argmax()))
        if token_ids[-1] == END_TOKEN_ID:
            break
    return token_ids[len(request.prompt_ids) :]


def make_restricted_requests(num_requests: int, sampling: Sampling) -> list[EngineRequest]:
    """Return requests with random prompts, restricted to the answers in turn."""
    return [
        replace(request, sampling=sampling, answers=AnswerTrie(ANSWERS[index % len(ANSWERS)]))
        for index, request in enumerate(make_requests(num_requests))
    ]


@torch.no_grad()
def compute_restricted_logprobs(
    pair: EnginePair, request: EngineRequest, output: EngineOutput
) -> list[float]:
    """Return log-probs in float64, from a forward pass and the list of answers alone."""
    answers = ANSWERS[request.request_id % len(ANSWERS)]
    token_ids, logprobs = [*request.prompt_ids, *output.token_ids], []
    logits = pair.model(torch.tensor([token_ids]), use_cache=False).logits[0].double()
    for position, token_id in enumerate(output.token_ids):
        prefix = tuple(output.token_ids[:position])
        allowed = sorted({a[position] for a in answers if a[:position] == prefix and a != prefix})
        allowed_logits = logits[len(request.prompt_ids) + position - 1, allowed]
        temperature = request.sampling.temperature or 1.0
        allowed_logprobs = (allowed_logits / temperature).log_softmax(-1)
        logprobs.append(allowed_logprobs[allowed.index(token_id)].item())
    return logprobs


@pytest.mark.slow
@with_answers
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_completions_are_answers_with_renormalized_log_probs(
    pair: EnginePair, temperature: float
) -> None:
    requests = make_restricted_requests(30, Sampling(temperature, 6))
    outputs = complete(pair.engine, requests)
    for request in requests:
        output = outputs[request.request_id]
        assert tuple(output.token_ids) in ANSWERS[request.request_id % len(ANSWERS)]
        assert output.has_end_token
        expected = compute_restricted_logprobs(pair, request, output)
        assert output.logprobs == pytest.approx(expected, abs=TOLERANCE)
    forced_outputs = [outputs[index] for index in range(1, 30, 3)]
    assert all(output.logprobs == [0.0] * 3 for output in forced_outputs)


@pytest.mark.slow
@with_answers
def test_sampled_answers_have_the_frequencies_of_the_restricted_distribution(
    pair: EnginePair,
) -> None:
    answers, num_samples = ANSWERS[0], 1500
    trie, prompt = AnswerTrie(answers), [8, 60, 33, 21]
    requests = [
        EngineRequest(3 * i, prompt, Sampling(2.0, 6), seed=i, answers=trie)
        for i in range(num_samples)
    ]
    outputs = complete(pair.engine, requests)
    sampled_answers = [tuple(outputs[3 * i].token_ids) for i in range(num_samples)]
    for answer in answers:
        output = EngineOutput(0, list(answer), [], has_end_token=True)
        logprobs = compute_restricted_logprobs(pair, requests[0], output)
        share = sampled_answers.count(answer) / num_samples
        assert share == pytest.approx(float(torch.tensor(logprobs).sum().exp()), abs=0.05)


@pytest.mark.slow
@with_answers
def test_requests_without_answers_are_not_changed_by_others_in_the_batch(pair: EnginePair) -> None:
    requests = make_requests(30)
    expected = complete(pair.engine, requests)
    restricted_requests = [
        replace(request, request_id=request.request_id + 99)
        for request in make_restricted_requests(30, Sampling(1.0, 6))
    ]
    mixed_requests = [*requests, *restricted_requests]
    random.Random(0).shuffle(mixed_requests)
    outputs = complete(pair.engine, mixed_requests)
    for request in requests:
        output = outputs[request.request_id]
        assert output.token_ids == expected[request.request_id].token_ids
        expected_logprobs = expected[request.request_id].logprobs
        assert output.logprobs == pytest.approx(expected_logprobs, abs=TOLERANCE)
    for request in restricted_requests:
        answers = ANSWERS[(request.request_id - 99) % len(ANSWERS)]
        assert tuple(outputs[request.request_id].token_ids) in answers


@pytest.mark.slow
@with_answers
async def test_sampler_and_learner_agree_on_restricted_completions(pair: EnginePair) -> None:
    policy, temperature = PolicyModel(pair.model), 0.8
    requests = make_restricted_requests(24, Sampling(temperature, 6))
    for request in requests:
        pair.engine.submit(request)
    pair.engine.step()
    pair.sync(seed=1)  # running completions continue after a change of the weights
    assert all(
        tuple(output.token_ids) in ANSWERS[request_id % len(ANSWERS)]
        for request_id, output in drain(pair.engine).items()
    )
    generate = AsyncEngine(UnclosableEngine(pair.engine))
    try:
        completions = await asyncio.gather(
            *(generate(r.prompt_ids, r.sampling, r.seed, r.answers) for r in requests)
        )
        unrestricted_completion = await generate([8, 60], Sampling(1.0, 2), 0)
    finally:
        generate.close()
    for request, completion in zip(requests, completions, strict=True):
        token_ids = request.prompt_ids + completion.token_ids
        mask = [index >= len(request.prompt_ids) for index in range(len(token_ids))]
        sample = make_unscored_sample(token_ids, mask)
        sample = replace(sample, allowed_ids=completion.allowed_ids)
        micro_batch = pack_one_micro_batch([sample])
        with torch.no_grad():
            logprobs = micro_batch.gather_samples(policy(micro_batch.rows, temperature).logprobs)
        assert logprobs[0].tolist() == pytest.approx(completion.logprobs, abs=TOLERANCE)
    assert unrestricted_completion.allowed_ids is None

"""What every engine does, whatever computes: checked against a full forward without a cache."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ludus.trainer.interfaces import EngineRequest
from ludus.trainer.learner.model import Policy
from ludus.trainer.types import Probe, Sampling
from tests.rollout.engine_pair import (
    END_TOKEN_ID,
    PROBE,
    TOLERANCE,
    EnginePair,
    answer,
    drain,
    full_logprobs,
    largest_error,
    make_requests,
)

CHI_SQUARE_LIMIT = 27.88
"""What chi-square with nine degrees of freedom exceeds once in a thousand draws."""


def test_greedy_answers_are_those_of_a_plain_loop(pair: EnginePair) -> None:
    requests = make_requests(12, temperature=0.0)
    outputs = answer(pair.engine, requests)
    for request in requests:
        assert outputs[request.request_id].token_ids == greedy_answer(pair, request)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_logprobs_are_those_of_a_full_forward(pair: EnginePair, temperature: float) -> None:
    requests = make_requests(40, temperature=temperature)
    outputs = answer(pair.engine, requests)
    assert largest_error(pair.model, requests, outputs) < TOLERANCE


def test_greedy_and_sampled_requests_share_a_batch(pair: EnginePair) -> None:
    prompt = [8, 60, 33, 21]
    requests = [EngineRequest(i, prompt, Sampling(float(i % 2), 6)) for i in range(40)]
    outputs = answer(pair.engine, requests)
    greedy = {tuple(outputs[i].token_ids) for i in range(0, 40, 2)}
    sampled = {tuple(outputs[i].token_ids) for i in range(1, 40, 2)}
    assert greedy == {tuple(greedy_answer(pair, requests[0]))}
    assert len(sampled) > 10
    assert largest_error(pair.model, requests, outputs) < TOLERANCE


def test_an_answer_ends_with_the_end_token_or_at_its_limit(pair: EnginePair) -> None:
    requests = make_requests(150, max_tokens=40)
    outputs = answer(pair.engine, requests).values()
    assert {output.stopped for output in outputs} == {True, False}
    for output in outputs:
        assert (output.token_ids[-1] == END_TOKEN_ID) is output.stopped
        assert END_TOKEN_ID not in output.token_ids[:-1]
        assert output.stopped or len(output.token_ids) == 40
        assert len(output.logprobs) == len(output.token_ids)


def test_there_is_work_until_every_request_has_its_output(pair: EnginePair) -> None:
    requests = make_requests(30)
    assert not pair.engine.has_work
    pair.engine.submit(requests[0])
    assert pair.engine.has_work
    outputs = answer(pair.engine, requests[1:])
    assert outputs.keys() == {request.request_id for request in requests}
    assert not pair.engine.has_work


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_frequencies_follow_the_softmax(pair: EnginePair, temperature: float) -> None:
    prompt, num_samples = [8, 60, 33, 21], 3000
    requests = [EngineRequest(i, prompt, Sampling(temperature, 1)) for i in range(num_samples)]
    outputs = answer(pair.engine, requests)
    counts = Counter(output.token_ids[0] for output in outputs.values())
    with torch.no_grad():
        logits = pair.model(torch.tensor([prompt])).logits[0, -1]
    likeliest = torch.softmax(logits / temperature, dim=-1).topk(9)
    expected = [probability * num_samples for probability in likeliest.values.tolist()]
    seen = [counts[token_id] for token_id in likeliest.indices.tolist()]
    # All other tokens together are the tenth class.
    expected.append(num_samples - sum(expected))
    seen.append(num_samples - sum(seen))
    assert min(expected) > 5
    chi_square = sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
    assert chi_square < CHI_SQUARE_LIMIT


def test_loaded_weights_are_those_that_sample_and_score(pair: EnginePair) -> None:
    requests = make_requests(20)
    before = pair.engine.score(PROBE)
    for seed in range(3):
        pair.sync(seed)
        score = pair.engine.score(PROBE)
        assert score == pytest.approx(score_of(pair, PROBE), abs=TOLERANCE)
        assert score != pytest.approx(before, abs=0.01)
        before = score
        outputs = answer(pair.engine, requests)
        assert largest_error(pair.model, requests, outputs) < TOLERANCE


def test_a_probe_is_scored_while_requests_are_in_flight(pair: EnginePair) -> None:
    requests = make_requests(100)
    for request in requests:
        pair.engine.submit(request)
    outputs = {output.request_id: output for output in pair.engine.step()}
    assert pair.engine.has_work
    assert pair.engine.score(PROBE) == pytest.approx(score_of(pair, PROBE), abs=TOLERANCE)
    outputs |= drain(pair.engine)
    assert outputs.keys() == {request.request_id for request in requests}
    assert largest_error(pair.model, requests, outputs) < TOLERANCE


def test_sampler_and_learner_agree_after_every_sync(pair: EnginePair) -> None:
    temperature = 0.8
    policy = Policy(pair.model, temperature)
    requests = make_requests(16, temperature=temperature)
    for seed in range(3):
        pair.sync(seed)
        outputs = answer(pair.engine, requests)
        for request in requests:
            output = outputs[request.request_id]
            token_ids = torch.tensor([request.prompt_ids + output.token_ids])
            sampled = torch.arange(token_ids.shape[1])[None] >= len(request.prompt_ids)
            with torch.no_grad():
                logprobs, _ = policy(token_ids, sampled)
            assert logprobs[sampled].tolist() == pytest.approx(output.logprobs, abs=TOLERANCE)


def score_of(pair: EnginePair, probe: Probe) -> list[float]:
    """The probe's answer by the plain model."""
    return full_logprobs(pair.model, probe.prompt_ids, probe.completion_ids)


@torch.no_grad()
def greedy_answer(pair: EnginePair, request: EngineRequest) -> list[int]:
    """The likeliest token after the likeliest token, each from a full forward."""
    token_ids = list(request.prompt_ids)
    for _ in range(request.sampling.max_tokens):
        logits = pair.model(torch.tensor([token_ids]), use_cache=False).logits
        token_ids.append(int(logits[0, -1].argmax()))
        if token_ids[-1] == END_TOKEN_ID:
            break
    return token_ids[len(request.prompt_ids) :]

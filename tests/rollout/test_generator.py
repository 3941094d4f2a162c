"""Tests of the asynchronous engine: batches, weight loads and failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import torch

from ludus.proto.errors import EngineLostError
from ludus.trainer.core.types import SampledCompletion, Sampling, ScoringRequest
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from tests.env.polling import run_pending_tasks
from tests.rollout.fake_engine import FakeEngine

SAMPLING = Sampling(temperature=1.0, max_tokens=4)
CANARY_PROMPT = ScoringRequest([1, 2], [3])
WEIGHTS = {"weight": torch.zeros(1)}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def generator(engine: FakeEngine) -> AsyncIterator[AsyncEngine]:
    generator = AsyncEngine(engine)
    yield generator
    engine.release()
    generator.close()


async def test_concurrent_calls_become_one_batch(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    completions = await asyncio.gather(*(generator([i, 1], SAMPLING, 0) for i in range(20)))
    assert [completion.token_ids for completion in completions] == [[i + 1] for i in range(20)]
    assert engine.batches == [[[i, 1] for i in range(20)]]


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, math.inf])
async def test_logprob_that_is_not_finite_fails_only_its_own_call(
    engine: FakeEngine, generator: AsyncEngine, logprob: float
) -> None:
    engine.logprobs[5] = logprob
    outcomes = await asyncio.gather(
        *(generator([token_id], SAMPLING, 0) for token_id in (4, 5, 6)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [
        SampledCompletion,
        ValueError,
        SampledCompletion,
    ]
    assert f"the log-prob {logprob}" in str(outcomes[1])


async def test_calls_during_a_step_form_the_next_batch(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    first_call = await start_step(engine, generator([1], SAMPLING, 0))
    later_calls = [asyncio.create_task(generator([i], SAMPLING, 0)) for i in (2, 3, 4)]
    await run_pending_tasks()
    engine.release()
    await gather_in_time(first_call, *later_calls)
    assert engine.batches == [[[1]], [[2], [3], [4]]]


async def test_weights_load_between_steps_while_calls_wait(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    earlier_call = await start_step(engine, generator([1], SAMPLING, 0))
    load_task = asyncio.create_task(generator.load_weights(WEIGHTS, version=7))
    await run_pending_tasks()
    assert engine.loaded_states == []
    engine.release()
    completion, _ = await gather_in_time(earlier_call, load_task)
    assert engine.loaded_states == [WEIGHTS]
    assert completion.policy_version == 0
    assert (await generator([1], SAMPLING, 0)).policy_version == 7


async def test_only_loading_and_scoring_count_as_pauses(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    call = await start_step(engine, generator([1], SAMPLING, 0))
    engine.release()
    await gather_in_time(call)
    assert generator.pause_s == 0.0
    engine.load_duration_s = 0.05
    await generator.load_weights(WEIGHTS, version=1)
    await generator.score([CANARY_PROMPT])
    assert generator.pause_s >= 0.05


async def test_engine_receives_the_seed_of_each_request(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    await asyncio.gather(*(generator([1], SAMPLING, seed) for seed in (5, 9)))
    assert engine.seeds == [5, 9]


async def test_score_uses_previously_loaded_weights(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    call = await start_step(engine, generator([1], SAMPLING, 0))
    load_task = asyncio.create_task(generator.load_weights(WEIGHTS, version=1))
    score_task = asyncio.create_task(generator.score([CANARY_PROMPT]))
    await asyncio.sleep(0)
    engine.release()
    assert (await gather_in_time(call, load_task, score_task))[2] == [[-1.0]]


async def test_failed_weight_load_fails_only_the_caller(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    engine.failure = ValueError("no such tensor")
    with pytest.raises(ValueError, match="no such tensor"):
        await generator.load_weights(WEIGHTS, version=1)
    assert (await generator([1], SAMPLING, 0)).policy_version == 0


async def test_failed_step_fails_all_waiting_calls(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    batch_call = await start_step(engine, generator([1], SAMPLING, 0))
    waiting_tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(generator([2], SAMPLING, 0)),
        asyncio.create_task(generator.load_weights(WEIGHTS, version=1)),
        asyncio.create_task(generator.score([CANARY_PROMPT])),
    ]
    await run_pending_tasks()
    engine.failure = RuntimeError("out of memory")
    engine.release()
    for task in [batch_call, *waiting_tasks]:
        with pytest.raises(EngineLostError, match="RuntimeError: out of memory"):
            await asyncio.wait_for(task, timeout=60)
    with pytest.raises(EngineLostError, match="out of memory"):
        await asyncio.wait_for(generator.wait_until_lost(), timeout=60)
    assert engine.is_closed.wait(timeout=60)


async def test_call_after_an_engine_failure_fails_immediately(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    engine.failure = RuntimeError("out of memory")
    with pytest.raises(EngineLostError, match="out of memory"):
        await generator([1], SAMPLING, 0)
    for call in (generator([1], SAMPLING, 0), generator.score([CANARY_PROMPT])):
        with pytest.raises(EngineLostError, match=r"the engine has failed.*out of memory"):
            await asyncio.wait_for(call, timeout=60)


async def test_invalid_request_does_not_affect_other_requests(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    first_completion, error, last_completion = await gather_in_time(
        *(
            asyncio.create_task(catch_error(generator(prompt, SAMPLING, 0)))
            for prompt in ([1], [], [2])
        )
    )
    assert str(error) == "the prompt is empty"
    assert (first_completion.token_ids, last_completion.token_ids) == ([1], [2])
    assert engine.batches == [[[1], [2]]], "the engine kept the request that it refused"
    assert (await generator([3], SAMPLING, 0)).token_ids == [3]


async def test_cancelled_call_does_not_affect_other_calls(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    cancelled_call = await start_step(engine, generator([1], SAMPLING, 0))
    kept_call = asyncio.create_task(generator([2], SAMPLING, 0))
    cancelled_call.cancel()
    await asyncio.sleep(0)
    engine.release()
    assert (await gather_in_time(kept_call))[0].token_ids == [2]


async def test_cancelled_call_is_aborted_and_not_sampled(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    first_call = await start_step(engine, generator([1], SAMPLING, 0))
    cancelled_call, kept_call = (asyncio.create_task(generator([i], SAMPLING, 0)) for i in (2, 3))
    await run_pending_tasks()
    cancelled_call.cancel()
    await run_pending_tasks()
    engine.release()
    await gather_in_time(first_call, kept_call)
    assert engine.batches == [[[1]], [[3]]]
    assert engine.aborted_ids == [1]


async def test_immediately_cancelled_call_never_reaches_the_engine(
    engine: FakeEngine, generator: AsyncEngine
) -> None:
    cancelled_call, kept_call = (asyncio.create_task(generator([i], SAMPLING, 0)) for i in (1, 2))
    await asyncio.sleep(0)
    cancelled_call.cancel()
    await gather_in_time(kept_call)
    assert engine.batches == [[[2]]]


async def test_close_of_the_generator_closes_the_engine(engine: FakeEngine) -> None:
    generator = AsyncEngine(engine)
    await generator([1], SAMPLING, 0)
    generator.close()
    assert engine.is_closed.is_set()


async def catch_error(
    call: Coroutine[Any, Any, SampledCompletion],
) -> SampledCompletion | Exception:
    """Return the result or the error of the call."""
    try:
        return await call
    except Exception as error:  # noqa: BLE001 - the test inspects the error
        return error


async def start_step(
    engine: FakeEngine, call: Coroutine[Any, Any, SampledCompletion]
) -> asyncio.Task[SampledCompletion]:
    """Start the call; return its task when the engine waits inside a step."""
    engine.hold()
    task = asyncio.create_task(call)
    assert await asyncio.to_thread(engine.is_stepping.wait, 60)
    return task


async def gather_in_time(*tasks: asyncio.Task[Any]) -> list[Any]:
    """Return the results of the tasks; fail after 60 s."""
    return await asyncio.wait_for(asyncio.gather(*tasks), timeout=60)

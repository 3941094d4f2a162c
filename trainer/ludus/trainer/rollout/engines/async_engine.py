"""An engine on its own thread, behind a coroutine that samples one completion.

    event loop                          engine thread
    ----------                          -------------
    await generate(...)   -- inbox -->  submit, step, step ...
    future is resolved    <-- batch --  outputs of a step
    cancelled             -- inbox -->  abort
    await load(...)       -- inbox -->  between two steps: weights change in flight

The thread empties the inbox before each step, so all calls that arrive during a step join the
next batch.

If the engine refuses a request or cannot load weights, only that call fails. If a step fails, the
engine stops, and all current and later calls raise EngineLostError. `wait_until_lost` raises the
same error for the component that replaces the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import torch

from ludus.proto.config import LanguageModelRun, TransformersGenerator, VllmGenerator
from ludus.proto.errors import EngineLostError
from ludus.trainer.core.answer_trie import AnswerTrie
from ludus.trainer.core.devices import choose_device
from ludus.trainer.core.interfaces import Engine, EngineOutput, EngineRequest, StateDict
from ludus.trainer.core.types import SampledCompletion, Sampling, ScoringRequest
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_language_model


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    future: asyncio.Future[SampledCompletion]
    version: int
    """Version of the weights when the request was made."""
    answers: AnswerTrie | None = None


class AsyncEngine:
    """An engine behind coroutines. It must be created and used on the same event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """Calls that the engine's thread makes between two steps; None closes the engine."""
        self._pending_requests: dict[int, _PendingRequest] = {}
        self._call_futures: set[asyncio.Future[Any]] = set()
        """Futures of unfinished weight loads and scoring requests."""
        self._request_ids = itertools.count()
        self._unsent_requests: list[EngineRequest] = []
        self._version = 0
        self._failure: EngineLostError | None = None
        self._lost_event = asyncio.Event()
        self.pause_s = 0.0
        """Total duration of weight loads and scoring, in seconds. Nothing is sampled meanwhile."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the weights with which the next token is sampled."""
        return self._version

    async def __call__(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        seed: int,
        answers: AnswerTrie | None = None,
    ) -> SampledCompletion:
        """Sample one completion, one of `answers`. Cancelling the call aborts the request.

        Raises:
            EngineLostError: the engine has failed.
            ValueError: a log-prob is not finite, so that the episode must not be trained on.
            Exception: the engine refuses this request.
        """
        self._refuse_if_failed()
        request_id = next(self._request_ids)
        pending_request = _PendingRequest(self._loop.create_future(), self._version, answers)
        self._pending_requests[request_id] = pending_request
        if not self._unsent_requests:
            # All calls of this event-loop iteration are sent together.
            self._loop.call_soon(self._send_requests)
        self._unsent_requests.append(EngineRequest(request_id, prompt_ids, sampling, seed, answers))
        try:
            return await pending_request.future
        except asyncio.CancelledError:
            self._abort(request_id)
            raise

    async def load_weights(self, state: StateDict, version: int) -> None:
        """Load the weights with which the next token is sampled."""
        await self._call_engine(partial(self.engine.load_weights, state))
        self._version = version

    async def score(self, requests: Sequence[ScoringRequest]) -> list[list[float]]:
        """Return the log-probs of each request's completion under the current weights."""
        return await self._call_engine(lambda: [self.engine.score(request) for request in requests])

    async def wait_until_lost(self) -> NoReturn:
        """Wait until the engine fails, and raise an EngineLostError with its error as the cause."""
        await self._lost_event.wait()
        assert self._failure is not None
        raise self._failure

    def close(self) -> None:
        """Stop the thread and close the engine."""
        self._inbox.put(None)
        self._thread.join(timeout=10)

    async def _call_engine(self, function: Callable[[], Any]) -> Any:
        self._refuse_if_failed()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._call_futures.add(future)
        future.add_done_callback(self._call_futures.discard)
        self._inbox.put(partial(self._execute, function, future))
        return await future

    def _send_requests(self) -> None:
        requests = []
        for request in self._unsent_requests:
            if self._pending_requests[request.request_id].future.cancelled():
                del self._pending_requests[request.request_id]
            else:
                requests.append(request)
        self._unsent_requests = []
        if requests:
            self._inbox.put(partial(self._submit, requests))

    def _abort(self, request_id: int) -> None:
        if self._pending_requests.pop(request_id, None) is None:
            return
        queue = [request for request in self._unsent_requests if request.request_id != request_id]
        if len(queue) == len(self._unsent_requests):
            self._inbox.put(partial(self.engine.abort, [request_id]))
        self._unsent_requests = queue

    def _run(self) -> None:
        try:
            while self._make_inbox_calls():
                outputs = self.engine.step() if self.engine.has_work else []
                if outputs:
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
        except BaseException as error:  # noqa: BLE001 - handed to every waiting caller
            self._loop.call_soon_threadsafe(self._fail, error)
        finally:
            self.engine.close()

    def _make_inbox_calls(self) -> bool:
        """Make all calls in the inbox; return False if the engine must close.

        If the engine has no work, wait for a call.
        """
        should_wait = not self.engine.has_work
        while True:
            try:
                call = self._inbox.get(block=should_wait)
            except Empty:
                return True
            should_wait = False
            if call is None:
                return False
            call()

    def _submit(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            try:
                self.engine.submit(request)
            except Exception as error:  # noqa: BLE001 - handed to the caller
                # The engine may have stored part of the refused request.
                self.engine.abort([request.request_id])
                self._loop.call_soon_threadsafe(self._refuse, request.request_id, error)

    def _execute(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        start_s = time.perf_counter()
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self._loop.call_soon_threadsafe(_settle, future, None, error)
        else:
            self.pause_s += time.perf_counter() - start_s
            self._loop.call_soon_threadsafe(_settle, future, result)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            pending_request = self._pending_requests.pop(output.request_id, None)
            if pending_request is None:
                continue
            try:
                completion = _make_completion(output, pending_request)
            except ValueError as error:
                _settle(pending_request.future, error=error)
            else:
                _settle(pending_request.future, completion)

    def _refuse(self, request_id: int, error: Exception) -> None:
        pending_request = self._pending_requests.pop(request_id, None)
        if pending_request is not None:
            _settle(pending_request.future, error=error)

    def _fail(self, error: BaseException) -> None:
        """Fail all calls. This runs on the event loop, so that no call can start meanwhile."""
        self._failure = EngineLostError(f"the engine has failed: {type(error).__name__}: {error}")
        self._failure.__cause__ = error
        self._lost_event.set()
        futures = [request.future for request in self._pending_requests.values()]
        for future in (*futures, *self._call_futures):
            _settle(future, error=self._failure)
        self._pending_requests.clear()

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure


def _make_completion(output: EngineOutput, request: _PendingRequest) -> SampledCompletion:
    """Return the completion of a request.

    Raises:
        ValueError: the engine sampled a token that no episode may be trained on.
    """
    invalid_logprobs = [value for value in output.logprobs if not math.isfinite(value)]
    if invalid_logprobs:
        raise ValueError(
            f"the engine sampled a token with the log-prob {invalid_logprobs[0]}; the "
            "model's values are not finite: lower learner.learning_rate, or use another "
            "learner.dtype"
        )
    return SampledCompletion(
        output.token_ids,
        output.logprobs,
        request.version,
        output.has_end_token,
        None if request.answers is None else request.answers.list_allowed_ids(output.token_ids),
    )


def _settle(
    future: asyncio.Future[Any], result: Any = None, error: BaseException | None = None
) -> None:
    """Set the result or the error of a future, unless its caller was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def make_engine(
    run: LanguageModelRun,
    model_path: str,
    chat: ChatTokenizer,
    device: torch.device | None = None,
) -> Engine:
    """Return the engine that the run selects, with the model at `model_path`.

    Args:
        device: device of the model. None selects a GPU if there is one.

    Raises:
        ConfigError: the engine cannot use the device.
    """
    # vLLM may not be installed, so each engine is imported only if it is used.
    match run.generator:
        case TransformersGenerator():
            from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine

            model = load_language_model(model_path, getattr(torch, run.learner.dtype))
            return TransformersEngine(
                model.to(choose_device(device)),
                end_token_ids=chat.end_token_ids,
                max_batch_size=run.generator.max_batch_size,
                kv_cache_mib=run.generator.kv_cache_mib,
                prefix_cache_mib=run.generator.prefix_cache_mib,
            )
        case VllmGenerator():
            from ludus.trainer.rollout.engines.vllm_engine import VllmEngine

            return VllmEngine(
                model_path,
                run.generator,
                end_token_ids=chat.end_token_ids,
                max_tokens=run.generator.max_model_tokens or run.rollout.max_tokens,
                dtype=run.learner.dtype,
                device=device,
                restricts_to_answers=run.rollout.constrain == "legal_answers",
            )

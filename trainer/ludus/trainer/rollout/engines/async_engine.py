"""An engine on its own thread, behind a coroutine that samples one completion.

    event loop                          engine thread
    ----------                          -------------
    await generate(...)   -- inbox -->  submit, step, step ...
    future is resolved    <-- batch --  outputs of a step
    cancelled             -- inbox -->  abort
    await load(...)       -- inbox -->  between two steps: weights change in flight

The thread takes everything out of the inbox before each step, so calls that arrive during a step
form the next batch without a timer.

A request that the engine refuses, and weights that it cannot load, fail only their own call. A
step that fails stops the engine: all current and later calls raise EngineLostError, and
`until_lost` raises it for the component that replaces the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from ludus.proto.config import LanguageModelRun, TransformersGenerator, VllmGenerator
from ludus.proto.errors import EngineLostError
from ludus.trainer.core.interfaces import Engine, EngineOutput, EngineRequest, StateDict
from ludus.trainer.core.types import SampledCompletion, Sampling, ScoringRequest
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_language_model


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    future: asyncio.Future[SampledCompletion]
    version: int
    """Version of the weights when the request was made."""


class AsyncEngine:
    """An engine behind coroutines, created and used on one event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls to make on the engine's thread between two steps; None closes the engine."""
        self._pending: dict[int, _PendingRequest] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        """Results of weight loads and scoring requests that are waited for."""
        self._next_id = itertools.count()
        self._unsent: list[EngineRequest] = []
        self._version = 0
        self._failure: EngineLostError | None = None
        self._lost = asyncio.Event()
        self.pause_s = 0.0
        """Total time of weight loads and scoring requests, during which nothing was sampled."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._version

    async def __call__(
        self, prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> SampledCompletion:
        """Sample one completion; cancelling the call aborts the request.

        Raises:
            EngineLostError: the engine has failed; an error of another class refuses this request.
        """
        self._refuse_if_failed()
        request_id = next(self._next_id)
        pending_request = _PendingRequest(self._loop.create_future(), self._version)
        self._pending[request_id] = pending_request
        if not self._unsent:
            # All calls of this turn of the event loop are sent together.
            self._loop.call_soon(self._send)
        self._unsent.append(EngineRequest(request_id, prompt_ids, sampling, seed))
        try:
            return await pending_request.future
        except asyncio.CancelledError:
            self._abort(request_id)
            raise

    async def load_weights(self, state: StateDict, version: int) -> None:
        """Load the weights that the next token is sampled with."""

        def load() -> None:
            self.engine.load_weights(state)

        await self._call_on_thread(load)
        self._version = version

    async def score(self, requests: Sequence[ScoringRequest]) -> list[list[float]]:
        """Return the log-probs of each request's completion under the current weights."""
        return await self._call_on_thread(
            lambda: [self.engine.score(request) for request in requests]
        )

    async def until_lost(self) -> NoReturn:
        """Wait until the engine fails, and raise an EngineLostError with its error as the cause."""
        await self._lost.wait()
        assert self._failure is not None
        raise self._failure

    def close(self) -> None:
        """Stop the thread and close the engine."""
        self._inbox.put(None)
        self._thread.join(timeout=10)

    async def _call_on_thread(self, run: Callable[[], Any]) -> Any:
        self._refuse_if_failed()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._inbox.put(partial(self._execute, run, future))
        return await future

    def _send(self) -> None:
        requests = []
        for request in self._unsent:
            if self._pending[request.request_id].future.cancelled():
                del self._pending[request.request_id]
            else:
                requests.append(request)
        self._unsent = []
        if requests:
            self._inbox.put(partial(self._submit, requests))

    def _abort(self, request_id: int) -> None:
        if self._pending.pop(request_id, None) is None:
            return
        unsent = [request for request in self._unsent if request.request_id != request_id]
        if len(unsent) == len(self._unsent):
            self._inbox.put(partial(self.engine.abort, [request_id]))
        self._unsent = unsent

    def _run(self) -> None:
        try:
            while self._process_inbox():
                outputs = self.engine.step() if self.engine.has_work else []
                if outputs:
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
        except BaseException as error:  # noqa: BLE001 - handed to every waiting caller
            self._loop.call_soon_threadsafe(self._fail, error)
        finally:
            self.engine.close()

    def _process_inbox(self) -> bool:
        """Process the inbox and return False once closed; wait only while the engine is idle."""
        wait = not self.engine.has_work
        while True:
            try:
                call = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
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

    def _execute(self, run: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        started_s = time.perf_counter()
        try:
            result = run()
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self._loop.call_soon_threadsafe(_settle, future, None, error)
        else:
            self.pause_s += time.perf_counter() - started_s
            self._loop.call_soon_threadsafe(_settle, future, result)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            pending_request = self._pending.pop(output.request_id, None)
            if pending_request is not None:
                completion = SampledCompletion(
                    output.token_ids, output.logprobs, pending_request.version, output.has_end_token
                )
                _settle(pending_request.future, completion)

    def _refuse(self, request_id: int, error: Exception) -> None:
        pending_request = self._pending.pop(request_id, None)
        if pending_request is not None:
            _settle(pending_request.future, error=error)

    def _fail(self, error: BaseException) -> None:
        """Fail all calls; runs on the event loop, so that no call can start in between."""
        self._failure = EngineLostError(f"the engine has failed: {type(error).__name__}: {error}")
        self._failure.__cause__ = error
        self._lost.set()
        for future in (*(request.future for request in self._pending.values()), *self._calls):
            _settle(future, error=self._failure)
        self._pending.clear()

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure


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


def make_engine(run: LanguageModelRun, model_path: str, chat: ChatTokenizer) -> Engine:
    """Return an engine with the model in `model_path`."""
    # vLLM may not be installed, so each engine is imported only if it is used.
    match run.generator:
        case TransformersGenerator():
            from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine

            model = load_language_model(model_path, getattr(torch, run.learner.dtype))
            if torch.cuda.is_available():
                model = model.to("cuda")
            return TransformersEngine(
                model,
                end_token_id=chat.end_token_id,
                max_batch_size=run.generator.max_batch_size,
            )
        case VllmGenerator():
            from ludus.trainer.rollout.engines.vllm_engine import VllmEngine

            return VllmEngine(
                model_path,
                run.generator,
                end_token_id=chat.end_token_id,
                max_tokens=run.generator.max_model_tokens or run.rollout.max_tokens,
                dtype=run.learner.dtype,
            )

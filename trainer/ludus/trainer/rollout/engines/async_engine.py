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
from typing import Any, NoReturn

from ludus.proto.errors import EngineLostError
from ludus.trainer.core.interfaces import Engine, EngineOutput, EngineRequest, StateDict
from ludus.trainer.core.types import SampledCompletion, Sampling, ScoringRequest


@dataclass(slots=True)
class _PendingRequest:
    future: asyncio.Future[SampledCompletion]
    version: int


@dataclass(frozen=True, slots=True)
class _EngineCall:
    """A function that runs on the engine's thread between two steps."""

    run: Callable[[], Any]
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Abort:
    """A request whose caller was cancelled."""

    request_id: int


class AsyncEngine:
    """An engine behind coroutines, created and used on one event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[list[EngineRequest] | _EngineCall | _Abort | None] = (
            queue.SimpleQueue()
        )
        self._pending: dict[int, _PendingRequest] = {}
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
            EngineLostError: the engine has failed.
            Exception: the engine refuses this request.
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
        """Wait until the engine fails, and raise its error.

        Raises:
            EngineLostError: the engine has failed; its cause is the engine's own error.
        """
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
        self._inbox.put(_EngineCall(run, future))
        return await future

    def _send(self) -> None:
        if self._unsent:
            self._inbox.put(self._unsent)
            self._unsent = []

    def _abort(self, request_id: int) -> None:
        if self._pending.pop(request_id, None) is None:
            return
        unsent = [request for request in self._unsent if request.request_id != request_id]
        if len(unsent) == len(self._unsent):
            self._inbox.put(_Abort(request_id))
        self._unsent = unsent

    def _run(self) -> None:
        """Run the engine's thread."""
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
                item = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if item is None:
                return False
            if isinstance(item, _EngineCall):
                self._execute(item)
            elif isinstance(item, _Abort):
                self.engine.abort([item.request_id])
            else:
                for request in item:
                    self._submit(request)

    def _submit(self, request: EngineRequest) -> None:
        try:
            self.engine.submit(request)
        except Exception as error:  # noqa: BLE001 - handed to the caller
            # The engine may have stored part of the refused request.
            self.engine.abort([request.request_id])
            self._loop.call_soon_threadsafe(self._refuse, request.request_id, error)

    def _execute(self, call: _EngineCall) -> None:
        started_s = time.perf_counter()
        try:
            result = call.run()
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self._loop.call_soon_threadsafe(call.future.set_exception, error)
        else:
            self.pause_s += time.perf_counter() - started_s
            self._loop.call_soon_threadsafe(call.future.set_result, result)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            pending_request = self._pending.pop(output.request_id, None)
            if pending_request is None or pending_request.future.done():
                continue
            pending_request.future.set_result(
                SampledCompletion(
                    output.token_ids, output.logprobs, pending_request.version, output.has_end_token
                )
            )

    def _refuse(self, request_id: int, error: Exception) -> None:
        pending_request = self._pending.pop(request_id, None)
        if pending_request is not None and not pending_request.future.done():
            pending_request.future.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        """Fail all calls; runs on the event loop, so that no call can start in between."""
        failure = EngineLostError(f"the engine has failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._failure = failure
        self._lost.set()
        futures: list[asyncio.Future[Any]] = [p.future for p in self._pending.values()]
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _EngineCall):
                futures.append(item.future)
        for future in futures:
            if not future.done():
                future.set_exception(failure)
        self._pending.clear()

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

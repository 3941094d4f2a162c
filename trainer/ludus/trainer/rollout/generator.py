"""Runs an engine in a thread of its own and gives the event loop one coroutine: generate.

    event loop                          engine thread
    ----------                          -------------
    await generate(...)   -- inbox -->  submit, step, step ...
    future is resolved    <-- batch --  outputs of a step
    cancelled             -- inbox -->  abort
    await load(...)       -- inbox -->  between two steps: weights change in flight

The thread takes all that waits in the inbox before each step, so calls that arrive while a
step runs form the next batch without any timer.

A request that the engine refuses, and weights that it cannot load, fail their own call alone. A
step that fails ends the engine: all calls, and all that come later, raise EngineLostError, and
`until_lost` tells whoever can put another engine in its place.
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
from ludus.trainer.core.types import Completion, Sampling, ScoringRequest


@dataclass(slots=True)
class _Pending:
    future: asyncio.Future[Completion]
    version: int


@dataclass(frozen=True, slots=True)
class _Order:
    """Something to run on the engine's thread between two steps."""

    run: Callable[[], Any]
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Abort:
    """A request whose answer nobody awaits any more."""

    request_id: int


class Generator:
    """An engine behind coroutines; made and used on one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[list[EngineRequest] | _Order | _Abort | None] = (
            queue.SimpleQueue()
        )
        self._pending: dict[int, _Pending] = {}
        self._next_id = itertools.count()
        self._unsent: list[EngineRequest] = []
        self._version = 0
        self._failure: EngineLostError | None = None
        self._lost = asyncio.Event()
        self.pause_s = 0.0
        """Time so far in loads of weights and in canary prompts, while nothing was sampled."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Of the weights that all further tokens come from."""
        return self._version

    async def __call__(self, prompt_ids: list[int], sampling: Sampling, seed: int) -> Completion:
        """One sampled completion; a call that is cancelled ends its generation.

        Raises:
            EngineLostError: the engine has failed, for this call and all others.
            Exception: the engine refuses this request.
        """
        self._refuse_if_failed()
        request_id = next(self._next_id)
        pending = _Pending(self._loop.create_future(), self._version)
        self._pending[request_id] = pending
        if not self._unsent:
            # All calls of this turn of the event loop travel together.
            self._loop.call_soon(self._send)
        self._unsent.append(EngineRequest(request_id, prompt_ids, sampling, seed))
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._give_up(request_id)
            raise

    async def load_weights(self, state: StateDict, version: int) -> None:
        """Load the weights that all further tokens come from."""

        def load() -> None:
            self._engine.load_weights(state)

        await self._order(load)
        self._version = version

    async def score(self, canary: Sequence[ScoringRequest]) -> list[list[float]]:
        """Log-probs of each canary prompt's completion under the weights that sample now."""
        return await self._order(lambda: [self._engine.score(prompt) for prompt in canary])

    async def until_lost(self) -> NoReturn:
        """Wait for the engine's failure, and raise it.

        Raises:
            EngineLostError: with what the engine raised.
        """
        await self._lost.wait()
        assert self._failure is not None
        raise self._failure

    def close(self) -> None:
        """Stop the thread and close the engine."""
        self._inbox.put(None)
        self._thread.join(timeout=10)

    async def _order(self, run: Callable[[], Any]) -> Any:
        self._refuse_if_failed()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._inbox.put(_Order(run, future))
        return await future

    def _send(self) -> None:
        if self._unsent:
            self._inbox.put(self._unsent)
            self._unsent = []

    def _give_up(self, request_id: int) -> None:
        if self._pending.pop(request_id, None) is None:
            return
        unsent = [request for request in self._unsent if request.request_id != request_id]
        if len(unsent) == len(self._unsent):
            self._inbox.put(_Abort(request_id))
        self._unsent = unsent

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._take_inbox():
                outputs = self._engine.step() if self._engine.has_work else []
                if outputs:
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
        except BaseException as error:  # noqa: BLE001 - handed to every waiting caller
            self._loop.call_soon_threadsafe(self._fail, error)
        finally:
            self._engine.close()

    def _take_inbox(self) -> bool:
        """False once closed; waits only while the engine has nothing to do."""
        wait = not self._engine.has_work
        while True:
            try:
                item = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if item is None:
                return False
            if isinstance(item, _Order):
                self._execute(item)
            elif isinstance(item, _Abort):
                self._engine.abort([item.request_id])
            else:
                for request in item:
                    self._submit(request)

    def _submit(self, request: EngineRequest) -> None:
        try:
            self._engine.submit(request)
        except Exception as error:  # noqa: BLE001 - handed to the caller
            # What an engine keeps of a request that it refuses would never be answered.
            self._engine.abort([request.request_id])
            self._loop.call_soon_threadsafe(self._refuse, request.request_id, error)

    def _execute(self, order: _Order) -> None:
        started_s = time.perf_counter()
        try:
            result = order.run()
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self._loop.call_soon_threadsafe(order.future.set_exception, error)
        else:
            self.pause_s += time.perf_counter() - started_s
            self._loop.call_soon_threadsafe(order.future.set_result, result)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            pending = self._pending.pop(output.request_id, None)
            if pending is None or pending.future.done():
                continue
            pending.future.set_result(
                Completion(output.token_ids, output.logprobs, pending.version, output.has_end_token)
            )

    def _refuse(self, request_id: int, error: Exception) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is not None and not pending.future.done():
            pending.future.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        """Runs on the event loop, as all calls do: none can slip in unseen."""
        failure = EngineLostError(f"the engine has failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._failure = failure
        self._lost.set()
        futures: list[asyncio.Future[Any]] = [p.future for p in self._pending.values()]
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Order):
                futures.append(item.future)
        for future in futures:
            if not future.done():
                future.set_exception(failure)
        self._pending.clear()

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

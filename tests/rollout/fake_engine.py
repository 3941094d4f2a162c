"""An engine without a model: it outputs the sum of the prompt and records its calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from ludus.trainer.core.interfaces import EngineOutput, EngineRequest, StateDict
from ludus.trainer.core.types import ScoringRequest


class FakeEngine:
    """An engine that completes all waiting requests in one step.

    `hold` makes the next step wait for `release`, like a long step of a real engine. The event
    `is_stepping` is set while a step waits.
    """

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        """The prompts of each step."""
        self.loaded_states: list[StateDict] = []
        self.load_duration_s = 0.0
        self.aborted_ids: list[int] = []
        """The requests that were aborted while they waited."""
        self.seeds: list[int] = []
        """The seeds of all requests."""
        self.failure: Exception | None = None
        """Error that the next step, load or score raises."""
        self.is_stepping = threading.Event()
        self.is_closed = threading.Event()
        self._continue_event = threading.Event()
        self._continue_event.set()
        self._waiting_requests: list[EngineRequest] = []

    def hold(self) -> None:
        """Make the next step wait for `release`."""
        self._continue_event.clear()

    def release(self) -> None:
        """Let the waiting step finish."""
        self._continue_event.set()

    @property
    def has_work(self) -> bool:
        """True if a request waits."""
        return bool(self._waiting_requests)

    def submit(self, request: EngineRequest) -> None:
        """Queue the request for the next step; record and refuse an empty prompt."""
        self._waiting_requests.append(request)
        if not request.prompt_ids:
            raise ValueError("the prompt is empty")
        self.seeds.append(request.seed)

    def abort(self, request_ids: Collection[int]) -> None:
        """Remove the waiting requests with these ids."""
        waiting_ids = [request.request_id for request in self._waiting_requests]
        self.aborted_ids += [request_id for request_id in request_ids if request_id in waiting_ids]
        self._waiting_requests = [
            request for request in self._waiting_requests if request.request_id not in request_ids
        ]

    def step(self) -> list[EngineOutput]:
        """Return the sum of each waiting prompt."""
        requests, self._waiting_requests = self._waiting_requests, []
        self.batches.append([request.prompt_ids for request in requests])
        self.is_stepping.set()
        assert self._continue_event.wait(timeout=60)
        self.is_stepping.clear()
        self._raise_failure()
        return [
            EngineOutput(request.request_id, [sum(request.prompt_ids)], [-0.5], has_end_token=True)
            for request in requests
        ]

    def load_weights(self, state: StateDict) -> None:
        """Record the state; fail if a step is running."""
        assert not self.is_stepping.is_set()
        self._raise_failure()
        time.sleep(self.load_duration_s)
        self.loaded_states.append(state)

    def score(self, canary: ScoringRequest) -> list[float]:
        """Return log-probs that count the loads of weights."""
        self._raise_failure()
        return [-float(len(self.loaded_states))] * len(canary.completion_ids)

    def close(self) -> None:
        """Record the call."""
        self.is_closed.set()

    def _raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

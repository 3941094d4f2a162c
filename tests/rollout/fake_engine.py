"""A fake engine that outputs the sum of each prompt's token ids and records its calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from ludus.trainer.core.interfaces import EngineOutput, EngineRequest, StateDict
from ludus.trainer.core.types import ScoringRequest


class FakeEngine:
    """An engine that completes all queued requests in one step.

    `hold` makes the next step wait for `release`, like a long step of a real engine. The event
    `is_stepping` is set while a step waits.
    """

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        """Prompts of each step."""
        self.loaded_states: list[StateDict] = []
        self.load_duration_s = 0.0
        self.aborted_ids: list[int] = []
        """Ids of the queued requests that were aborted."""
        self.seeds: list[int] = []
        """Seeds of all accepted requests."""
        self.logprobs: dict[int, float] = {}
        """Log-probs of tokens; the others have -0.5."""
        self.failure: Exception | None = None
        """Error that the next call of `step`, `load_weights` or `score` raises."""
        self.is_stepping = threading.Event()
        self.is_closed = threading.Event()
        self._continue_event = threading.Event()
        self._continue_event.set()
        self._queued_requests: list[EngineRequest] = []

    def hold(self) -> None:
        """Make the next step wait for `release`."""
        self._continue_event.clear()

    def release(self) -> None:
        """Allow the waiting step to finish."""
        self._continue_event.set()

    @property
    def has_work(self) -> bool:
        """True if a request is queued."""
        return bool(self._queued_requests)

    def submit(self, request: EngineRequest) -> None:
        """Queue the request; raise an error for an empty prompt after queuing it."""
        self._queued_requests.append(request)
        if not request.prompt_ids:
            raise ValueError("the prompt is empty")
        self.seeds.append(request.seed)

    def abort(self, request_ids: Collection[int]) -> None:
        """Remove the queued requests with these ids."""
        queued_ids = [request.request_id for request in self._queued_requests]
        self.aborted_ids += [request_id for request_id in request_ids if request_id in queued_ids]
        self._queued_requests = [
            request for request in self._queued_requests if request.request_id not in request_ids
        ]

    def step(self) -> list[EngineOutput]:
        """Complete each queued request with the sum of its prompt's token ids."""
        requests, self._queued_requests = self._queued_requests, []
        self.batches.append([request.prompt_ids for request in requests])
        self.is_stepping.set()
        assert self._continue_event.wait(timeout=60), "release was not called within 60 s"
        self.is_stepping.clear()
        self._raise_failure()
        return [
            EngineOutput(
                request.request_id,
                [sum(request.prompt_ids)],
                [self.logprobs.get(sum(request.prompt_ids), -0.5)],
                has_end_token=True,
            )
            for request in requests
        ]

    def load_weights(self, state: StateDict) -> None:
        """Record the weights; fail if a step is running."""
        assert not self.is_stepping.is_set()
        self._raise_failure()
        time.sleep(self.load_duration_s)
        self.loaded_states.append(state)

    def score(self, canary: ScoringRequest) -> list[float]:
        """Return the negated number of weight loads as the log-prob of every token."""
        self._raise_failure()
        return [-float(len(self.loaded_states))] * len(canary.completion_ids)

    def close(self) -> None:
        """Set the event `is_closed`."""
        self.is_closed.set()

    def _raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

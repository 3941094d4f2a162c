"""The reward models of a rollout worker. Each model is loaded once and scores in batches.

    finished groups of all environments
        |  pairs of prompt and completion wait in the queue of a model
        v
    the model's thread: all queued pairs -> tokens -> batches of similar length -> scores

Each model has one thread. While the thread computes scores, the event loop continues to play. The
episodes that end meanwhile are scored together afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ludus.env import Message
from ludus.proto.config.environment import RewardModelTerm
from ludus.proto.errors import RewardFunctionError
from ludus.proto.rewards import REWARD_RULE, is_valid_reward
from ludus.trainer.reward_model import RewardModel, load_reward_model

_log = logging.getLogger(__name__)

Columns = dict[str, list[Any]]
"""Arguments of a reward function by name, each with one entry for each episode."""


class RewardModels:
    """The loaded reward models of a process."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, str | None, str], QueuedRewardModel] = {}
        """Models by path, device and dtype."""

    def load(self, term: RewardModelTerm) -> QueuedRewardModel:
        """Return the model of a term. Load it if it is not loaded yet."""
        key = (term.path, term.device, term.dtype)
        if key not in self._models:
            dtype = getattr(torch, term.dtype)
            model = load_reward_model(term.path, device=term.device, dtype=dtype)
            self._models[key] = QueuedRewardModel(model, term.path, term.max_tokens_per_batch)
        return self._models[key]

    def __len__(self) -> int:
        return len(self._models)

    def close(self) -> None:
        """Release all models and drop queued requests."""
        for model in self._models.values():
            model.close()
        self._models.clear()


_PromptAndCompletion = tuple[Sequence[Message], Sequence[Message]]


@dataclass(frozen=True, slots=True)
class _ScoreRequest:
    pairs: Sequence[_PromptAndCompletion]
    future: asyncio.Future[list[float]]


class QueuedRewardModel:
    """A reward model with a thread and a queue of requests."""

    remedy = "give it a GPU, use a smaller model, or raise the limit"

    def __init__(self, model: RewardModel, path: str, max_tokens_per_batch: int) -> None:
        self.description = f"reward model '{path}'"
        self._model = model
        self._max_tokens_per_batch = max_tokens_per_batch
        self._queue: list[_ScoreRequest] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._task: asyncio.Task[None] | None = None
        self._has_warned = False

    async def compute_values(self, columns: Columns, num_episodes: int) -> Sequence[float | None]:
        """Return [num_episodes] scores, one for the prompt and completion of each episode."""
        pairs = list(zip(columns["prompts"], columns["completions"], strict=True))
        request = _ScoreRequest(pairs, asyncio.get_running_loop().create_future())
        self._queue.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._score_queued_requests())
        scores = await request.future
        invalid_scores = [score for score in scores if not is_valid_reward(score)]
        if invalid_scores:
            raise RewardFunctionError(
                f"{self.description} returned the score {invalid_scores[0]}, which is not "
                f"{REWARD_RULE}; with float16 or bfloat16, set dtype = 'float32'"
            )
        return scores

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _score_queued_requests(self) -> None:
        """Score all queued requests together, and repeat until the queue is empty."""
        loop = asyncio.get_running_loop()
        while self._queue:
            # A request whose caller has stopped waiting is dropped.
            requests = [request for request in self._queue if not request.future.done()]
            self._queue = []
            pairs = [pair for request in requests for pair in request.pairs]
            try:
                scores = await loop.run_in_executor(self._thread, self._compute_scores, pairs)
            except Exception as error:  # noqa: BLE001 - reported to the callers
                self._fail_requests(requests, error)
                continue
            remaining_scores = iter(scores)
            for request in requests:
                request_scores = [next(remaining_scores) for _ in request.pairs]
                if not request.future.done():
                    request.future.set_result(request_scores)
        self._warn_of_cuts()

    def _compute_scores(self, pairs: Sequence[_PromptAndCompletion]) -> list[float]:
        prompts, completions = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        max_tokens = self._max_tokens_per_batch
        return self._model.score(prompts, completions, max_tokens_per_batch=max_tokens)

    def _fail_requests(self, requests: Sequence[_ScoreRequest], error: Exception) -> None:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        failure = RewardFunctionError(f"{self.description} has failed: {reason}")
        for request in requests:
            if not request.future.done():
                request.future.set_exception(failure)

    def _warn_of_cuts(self) -> None:
        encoder = self._model.encoder
        if encoder.num_texts_cut and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: an episode is longer than the model's limit of %d tokens; the beginning of "
                "such episodes is cut off",
                *(self.description, encoder.max_tokens),
            )

"""The reward models of a rollout worker, each of which is loaded once and scores in batches.

    groups that have ended, of any environment and term
        |  prompts and completions wait in the queue of their model
        v
    the model's thread: all waiting pairs -> tokens -> batches of similar length -> scores

Each model has one thread. While it computes, the event loop continues to play, and the episodes
that end in the meantime are scored together afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ludus.env import Message
from ludus.proto.config.environment import RewardModelTerm
from ludus.proto.errors import RewardFunctionError
from ludus.trainer.reward_model import RewardModel, load_reward_model
from ludus.trainer.rollout.rewards.reward_function import Columns

_log = logging.getLogger(__name__)


class _ModelKey(NamedTuple):
    """Settings that two terms must share to share a model."""

    path: str
    device: str | None
    dtype: str


class RewardModels:
    """The loaded reward models of a process."""

    def __init__(self) -> None:
        self._loaded: dict[_ModelKey, _QueuedModel] = {}

    def scorer(self, term: RewardModelTerm) -> RewardModelScorer:
        """Return the scorer of a term; load the model if no other term has loaded it.

        Raises:
            NotFoundError: the model does not exist.
            ConfigError: it is not a reward model, or the device does not exist.
        """
        key = _ModelKey(term.path, term.device, term.dtype)
        if key not in self._loaded:
            model = load_reward_model(
                term.path, device=term.device, dtype=getattr(torch, term.dtype)
            )
            self._loaded[key] = _QueuedModel(model, term.path, term.max_tokens_per_batch)
        return RewardModelScorer(self._loaded[key], term.path)

    def __len__(self) -> int:
        return len(self._loaded)

    def close(self) -> None:
        """Release all models and drop waiting requests."""
        for model in self._loaded.values():
            model.close()
        self._loaded.clear()


class RewardModelScorer:
    """The scorer of a term that a reward model computes."""

    def __init__(self, model: _QueuedModel, path: str) -> None:
        self._model = model
        self._path = path

    async def values(
        self, name: str, columns: Columns, num_episodes: int, timeout_s: float
    ) -> Sequence[float | None]:
        """Return [num_episodes] scores of each episode's completion after its prompt.

        Raises:
            RewardFunctionError: the model fails, exceeds the time limit, or returns a score that
                is not finite.
        """
        pairs = list(zip(columns["prompts"], columns["completions"], strict=True))
        try:
            async with asyncio.timeout(timeout_s):
                scores = await self._model.score(pairs)
        except TimeoutError:
            raise RewardFunctionError(
                f"reward model '{self._path}' (term '{name}') did not return scores within "
                f"rollout.group_timeout_s = {timeout_s:g} s; give it a GPU, use a smaller model, "
                "or raise the limit"
            ) from None
        invalid_scores = [score for score in scores if not math.isfinite(score)]
        if invalid_scores:
            raise RewardFunctionError(
                f"reward model '{self._path}' (term '{name}') returned the score "
                f"{invalid_scores[0]}, "
                "which is not finite; with float16 or bfloat16, set dtype = 'float32'"
            )
        return scores


_PromptAndCompletion = tuple[Sequence[Message], Sequence[Message]]


@dataclass(frozen=True, slots=True)
class _ScoreRequest:
    pairs: Sequence[_PromptAndCompletion]
    scores: asyncio.Future[list[float]]


class _QueuedModel:
    """A model with its thread and its queue."""

    def __init__(self, model: RewardModel, path: str, max_tokens_per_batch: int) -> None:
        self._model = model
        self._path = path
        self._max_tokens_per_batch = max_tokens_per_batch
        self._queue: list[_ScoreRequest] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._task: asyncio.Task[None] | None = None
        self._has_warned = False

    async def score(self, pairs: Sequence[_PromptAndCompletion]) -> list[float]:
        """Return the scores, which are computed together with the other requests in the queue."""
        request = _ScoreRequest(pairs, asyncio.get_running_loop().create_future())
        self._queue.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._empty_queue())
        return await request.scores

    def close(self) -> None:
        """Stop the thread and drop the queue."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _empty_queue(self) -> None:
        """Score all waiting requests at once until the queue is empty."""
        loop = asyncio.get_running_loop()
        while self._queue:
            # A request whose caller has stopped waiting is dropped.
            requests = [request for request in self._queue if not request.scores.done()]
            self._queue = []
            pairs = [pair for request in requests for pair in request.pairs]
            try:
                scores = await loop.run_in_executor(self._thread, self._compute, pairs)
            except Exception as error:  # noqa: BLE001 - reported to the callers
                self._fail(requests, error)
                continue
            remaining = iter(scores)
            for request in requests:
                own_scores = [next(remaining) for _ in request.pairs]
                if not request.scores.done():
                    request.scores.set_result(own_scores)
        self._warn_of_cuts()

    def _compute(self, pairs: Sequence[_PromptAndCompletion]) -> list[float]:
        prompts, completions = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        budget = self._max_tokens_per_batch
        return self._model.score(prompts, completions, max_tokens_per_batch=budget)

    def _fail(self, requests: Sequence[_ScoreRequest], error: Exception) -> None:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        for request in requests:
            if not request.scores.done():
                request.scores.set_exception(
                    RewardFunctionError(f"reward model '{self._path}' has failed: {reason}")
                )

    def _warn_of_cuts(self) -> None:
        encoder = self._model.encoder
        if encoder.num_cut and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "reward model '%s': an episode is longer than the model's limit of %d tokens; the "
                "beginning of such episodes is cut off",
                *(self._path, encoder.max_tokens),
            )

"""The reward models of a rollout worker: each loaded once, and asked in batches.

    groups that have ended, of any environment and term
        |  prompts and completions wait in the queue of their model
        v
    the model's own thread: all that wait -> tokens -> batches of similar length -> scores

A model has one thread: while it computes, the event loop plays on, and what ends meanwhile waits
together and is scored together.
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
from ludus.trainer.rollout.reward_function import Columns

_log = logging.getLogger(__name__)


class _Key(NamedTuple):
    """What makes two terms ask the same model."""

    path: str
    device: str | None
    dtype: str


class RewardModels:
    """Those of a process, by what they were loaded from."""

    def __init__(self) -> None:
        self._loaded: dict[_Key, _QueuedModel] = {}

    def scorer(self, term: RewardModelTerm) -> RewardModelScorer:
        """What asks the model of a term; the model is loaded unless another term has done so.

        Raises:
            NotFoundError: there is none.
            ConfigError: it is no reward model, or there is no such device.
        """
        key = _Key(term.path, term.device, term.dtype)
        if key not in self._loaded:
            model = load_reward_model(
                term.path, device=term.device, dtype=getattr(torch, term.dtype)
            )
            self._loaded[key] = _QueuedModel(model, term.path, term.max_tokens_per_batch)
        return RewardModelScorer(self._loaded[key], term.path)

    def __len__(self) -> int:
        return len(self._loaded)

    def close(self) -> None:
        """Let go of all of them, and of what waits."""
        for model in self._loaded.values():
            model.close()
        self._loaded.clear()


class RewardModelScorer:
    """A term that a reward model says."""

    def __init__(self, model: _QueuedModel, path: str) -> None:
        self._model = model
        self._path = path

    async def values(
        self, name: str, columns: Columns, num_episodes: int, timeout_s: float
    ) -> Sequence[float | None]:
        """[num_episodes] the score of each episode's completion after its prompt.

        Raises:
            RewardFunctionError: it fails, takes longer, or says what is no finite number.
        """
        asked = list(zip(columns["prompts"], columns["completions"], strict=True))
        try:
            async with asyncio.timeout(timeout_s):
                scores = await self._model.score(asked)
        except TimeoutError:
            raise RewardFunctionError(
                f"reward model '{self._path}' (term '{name}') expected to answer within "
                f"rollout.group_timeout_s = {timeout_s:g} s; give it a GPU, take a smaller one, or "
                "raise the limit"
            ) from None
        strange = [score for score in scores if not math.isfinite(score)]
        if strange:
            raise RewardFunctionError(
                f"reward model '{self._path}' (term '{name}') expected finite scores, got "
                f"{strange[0]}; in float16 or bfloat16 take dtype = 'float32'"
            )
        return scores


_Asked = tuple[Sequence[Message], Sequence[Message]]
"""Prompt and completion."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    asked: Sequence[_Asked]
    answer: asyncio.Future[list[float]]


class _QueuedModel:
    """A model with a thread of its own, and what waits for it."""

    def __init__(self, model: RewardModel, path: str, max_tokens_per_batch: int) -> None:
        self._model = model
        self._path = path
        self._max_tokens_per_batch = max_tokens_per_batch
        self._waiting: list[_Waiting] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._task: asyncio.Task[None] | None = None
        self._has_told_of_cuts = False
        self.num_batches = 0
        """Times that the thread was asked."""

    async def score(self, asked: Sequence[_Asked]) -> list[float]:
        """The scores, computed together with whatever else waits."""
        waiting = _Waiting(asked, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._answer_all())
        return await waiting.answer

    def close(self) -> None:
        """Answer nobody any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _answer_all(self) -> None:
        """Answer whoever waits, all at once, until nobody does."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            # Who has given up is asked for nothing.
            taken = [one for one in self._waiting if not one.answer.done()]
            self._waiting = []
            asked = [pair for one in taken for pair in one.asked]
            self.num_batches += 1
            try:
                scores = await loop.run_in_executor(self._thread, self._scores, asked)
            except Exception as error:  # noqa: BLE001 - theirs to say, who asked
                self._fail(taken, error)
                continue
            rest = iter(scores)
            for one in taken:
                part = [next(rest) for _ in one.asked]
                if not one.answer.done():
                    one.answer.set_result(part)
        self._tell_of_cuts()

    def _scores(self, asked: Sequence[_Asked]) -> list[float]:
        prompts, completions = [one[0] for one in asked], [one[1] for one in asked]
        budget = self._max_tokens_per_batch
        return self._model.score(prompts, completions, max_tokens_per_batch=budget)

    def _fail(self, taken: Sequence[_Waiting], error: Exception) -> None:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        for one in taken:
            if not one.answer.done():
                one.answer.set_exception(
                    RewardFunctionError(f"reward model '{self._path}' has failed: {reason}")
                )

    def _tell_of_cuts(self) -> None:
        texts = self._model.encoder
        if texts.num_cut and not self._has_told_of_cuts:
            self._has_told_of_cuts = True
            _log.warning(
                "reward model '%s': an episode is longer than the %d tokens that it takes; the "
                "beginning of such a one is cut off",
                *(self._path, texts.max_tokens),
            )

"""The comparison of a rollout function's rows with the engine that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.trainer.compat.trl.rollout.completion_service import RolloutCall
from ludus.trainer.compat.trl.rollout.contract import RolloutRow, RowRules
from ludus.trainer.core.types import Sampling, ScoringRequest
from ludus.trainer.rollout.engines.async_engine import AsyncEngine

MAX_LOGPROB_ERROR = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest accepted difference from the engine's log-prob, by the engine's type."""


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A row, and the oldest version of the weights that sampled any of its tokens."""

    row: RolloutRow
    policy_version: int


@dataclass(frozen=True, slots=True)
class RowCheck:
    """The comparison of a call's rows with the engine."""

    engine: AsyncEngine
    call: RolloutCall
    sampling: Sampling | None
    """Settings with which every trained token must be sampled; None in an evaluation."""
    max_logprob_error: float
    rules: RowRules

    async def run(self, index: int, row: RolloutRow) -> CheckedRow:
        """Return the row with its policy version if its log-probs are those of the engine.

        Raises:
            RolloutFunctionError: the log-probs or the sampling settings differ.
        """
        version = self.engine.version
        for start, end in row.sampled_spans:
            prompt_ids = [*row.prompt_ids, *row.completion_ids[:start]]
            token_ids, logprobs = row.completion_ids[start:end], row.logprobs[start:end]
            entry = self.call.find(prompt_ids, token_ids)
            if entry is not None:
                version = min(version, entry.completion.policy_version)
                expected = entry.completion.logprobs[: len(token_ids)]
                self._compare_sampling(entry.sampling, index)
            elif self.sampling is None:
                continue
            else:
                expected = await self._score(prompt_ids, token_ids, self.sampling, index)
            self._compare_logprobs(logprobs, expected, start, index)
        return CheckedRow(row, version)

    async def _score(
        self, prompt_ids: list[int], token_ids: list[int], sampling: Sampling, index: int
    ) -> list[float]:
        """Return the engine's log-probs of tokens that it did not sample in this call."""
        if sampling.temperature != 1 or not sampling.is_plain:
            raise self.rules.row_error(
                index,
                f"the {len(token_ids)} tokens after the first {len(prompt_ids)} were not sampled "
                "in this call. Their log-probs can only be checked at temperature 1 without cuts "
                "or penalties; return the engine's completions after the tokens that were sent",
            )
        return (await self.engine.score([ScoringRequest(prompt_ids, token_ids)]))[0]

    def _compare_logprobs(
        self, logprobs: Sequence[float], expected: Sequence[float], start: int, index: int
    ) -> None:
        for number, (logprob, engine_logprob) in enumerate(zip(logprobs, expected, strict=True)):
            if abs(logprob - engine_logprob) > self.max_logprob_error:
                raise self.rules.row_error(
                    index,
                    f"the log-prob of completion token {start + number} is {logprob:.4f}, but the "
                    f"engine's log-prob after the same tokens is {engine_logprob:.4f}; return the "
                    "engine's log-probs and, in prompt_ids and completion_ids, the tokens that it "
                    "saw, with env_mask 0 for tokens that it did not sample",
                )

    def _compare_sampling(self, sampling: Sampling, index: int) -> None:
        """Refuse tokens from another distribution than the one that the learner compares with."""
        if self.sampling is None:
            return
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            value, run_value = getattr(sampling, name), getattr(self.sampling, name)
            if value != run_value:
                raise self.rules.row_error(
                    index,
                    f"was sampled with {name} = {value:g}, but the run trains with {name} = "
                    f"{run_value:g}; use args.{name}, or change the configuration",
                )

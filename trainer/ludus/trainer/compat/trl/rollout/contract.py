"""The signatures of TRL's rollout functions, and the checks of the rows that they return.

    signature                                   prompts             returned rows
    (prompts, args, processing_class)           each once, as text  num_generations per prompt
    (prompts, images, args, processing_class)   each once, as text  num_generations per prompt
    (prompts, trainer)                          num_generations     one per prompt
                                                times each

    row:  prompt_ids  completion_ids  logprobs  [env_mask]  any other key: a column of rewards

Parameter names identify the signature; each belongs to a different version of TRL. The returned
rows are checked one by one before they are trained on.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import groupby
from numbers import Integral, Real
from typing import Any

from ludus.proto.errors import ConfigError, RolloutFunctionError
from ludus.trainer.compat.trl.rollout.completion_service import RolloutCall
from ludus.trainer.core.types import Sampling, ScoringRequest
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.rewards.arguments import STANDARD_ARGUMENTS

MakeError = Callable[[str], RolloutFunctionError]
"""A function that returns the error for a problem of one row."""
REQUIRED_KEYS = ("prompt_ids", "completion_ids", "logprobs")
MASK_KEY = "env_mask"
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings that determine the distribution of the samples."""
_MAX_LOGPROB = 1e-6
"""Largest log-prob: 0, plus a rounding error."""
MAX_LOGPROB_ERROR = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest accepted difference from the engine's log-prob, by the engine's type."""


class RolloutSignature(Enum):
    """A signature of a rollout function: the names of the parameters after the prompts."""

    ONCE = ("args", "processing_class")
    ONCE_WITH_IMAGES = ("images", "args", "processing_class")
    REPEATED = ("trainer",)

    @property
    def repeats_prompts(self) -> bool:
        """True if each prompt is repeated num_generations times."""
        return self is RolloutSignature.REPEATED


def find_signature(function: Callable[..., Any], path: str) -> RolloutSignature:
    """Return the signature of a rollout function, whose import path is `path`."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"environment.rollout = 'trl:{path}' must be a plain function, which runs in a thread, "
            "but it is a coroutine function; write `def`, or play single episodes with "
            f"rollout = '{path}' (docs/rewards.md)"
        )
    parameters = list(inspect.signature(function).parameters.values())
    variadic_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required_names = [
        parameter.name
        for parameter in parameters[1:]
        if parameter.default is parameter.empty and parameter.kind not in variadic_kinds
    ]
    for signature in RolloutSignature:
        if parameters and sorted(required_names) == sorted(signature.value):
            return signature
    names = {parameter.name for parameter in parameters[1:]}
    for signature in RolloutSignature:
        # A parameter of the signature may have a default.
        if set(required_names) <= set(signature.value) <= names:
            return signature
    raise ConfigError(
        f"environment.rollout = 'trl:{path}' must have one of the signatures "
        + ", ".join(f"(prompts, {', '.join(signature.value)})" for signature in RolloutSignature)
        + f", but it has ({', '.join(parameter.name for parameter in parameters)}); rename "
        "its parameters"
    )


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One episode as a rollout function returned it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    """[T] sampled tokens, and the environment's tokens between them."""
    logprobs: list[float]
    """[T] log-probs of the sampled tokens; ignored for the environment's tokens."""
    is_sampled: list[bool]
    """[T] False for tokens of the environment."""
    fields: Mapping[str, Any]
    """Values of all other keys."""
    policy_version: int = 0
    """Oldest version of the weights that sampled any of the tokens."""

    @property
    def sampled_spans(self) -> Iterator[tuple[int, int]]:
        """Start and end of each completion in `completion_ids`; the end is exclusive."""
        start = 0
        for is_sampled, tokens in groupby(self.is_sampled):
            end = start + sum(1 for _ in tokens)
            if is_sampled:
                yield start, end
            start = end


@dataclass(frozen=True, slots=True)
class RowRules:
    """The rules for the rows of one call."""

    path: str
    """Import path of the function."""
    num_prompts: int
    num_generations: int
    vocab_size: int
    max_tokens: int
    """Maximum number of tokens of prompt and completion together."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the call."""
        return self.num_prompts * self.num_generations

    def make_error(self, problem: str) -> RolloutFunctionError:
        """Return the error for a problem of the function."""
        return RolloutFunctionError(f"rollout function '{self.path}' {problem}")

    def make_row_error(self, index: int, problem: str) -> RolloutFunctionError:
        """Return the error for a problem of one row."""
        prompt, generation = divmod(index, self.num_generations)
        return self.make_error(f"row {index} (prompt {prompt}, completion {generation}): {problem}")


def read_rows(output: Any, rules: RowRules) -> list[RolloutRow]:
    """Return the rows in the output of a rollout function, prompt by prompt.

    The prompt tokens may have one entry per prompt, as `trl vllm-serve` returns them.
    """
    if not isinstance(output, Mapping):
        raise rules.make_error(f"must return a dictionary, but it returned {output!r:.100}")
    missing_keys = [key for key in REQUIRED_KEYS if output.get(key) is None]
    if missing_keys:
        raise rules.make_error(
            f"must return the keys {list(REQUIRED_KEYS)}, but it returned "
            f"{sorted(map(str, output))} without {missing_keys}; return the engine's output"
        )
    reserved_keys = sorted(STANDARD_ARGUMENTS.intersection(output) - set(REQUIRED_KEYS))
    if reserved_keys:
        raise rules.make_error(
            f"must not return the keys {reserved_keys}, which are arguments of the trainer for "
            "reward functions; rename them"
        )
    columns = {str(key): _read_column(key, value, rules) for key, value in output.items()}
    return [
        _read_row({key: values[row_index] for key, values in columns.items()}, row_index, rules)
        for row_index in range(rules.num_rows)
    ]


def _read_column(key: Any, column: Any, rules: RowRules) -> Sequence[Any]:
    """Return one entry for each row. A value that is not a list applies to every row."""
    entries = _to_list(column)
    if entries is None:
        if key in (*REQUIRED_KEYS, MASK_KEY) or isinstance(column, Iterator):
            raise rules.make_error(
                f"must return '{key}' as a list, but it returned {column!r:.100}"
            )
        return [column] * rules.num_rows
    if key == "prompt_ids" and len(entries) == rules.num_prompts:
        return [ids for ids in entries for _ in range(rules.num_generations)]
    if len(entries) != rules.num_rows:
        raise rules.make_error(
            f"must return {rules.num_rows} entries of '{key}', num_generations = "
            f"{rules.num_generations} for each of {rules.num_prompts} prompts, but it returned "
            f"{len(entries)}"
        )
    return entries


def _read_row(fields: dict[str, Any], row_index: int, rules: RowRules) -> RolloutRow:
    """Check and return the row with index `row_index`, whose values are `fields`."""
    make_error = partial(rules.make_row_error, row_index)
    prompt_ids, completion_ids = (
        _read_token_ids(key, fields.pop(key), rules.vocab_size, make_error)
        for key in ("prompt_ids", "completion_ids")
    )
    logprobs = _read_logprobs(fields.pop("logprobs"), make_error)
    num_tokens = len(completion_ids)
    if len(logprobs) != num_tokens:
        raise make_error(
            f"expected {num_tokens} logprobs, one per completion id, got {len(logprobs)}"
        )
    if len(prompt_ids) + num_tokens > rules.max_tokens:
        raise make_error(
            f"expected at most rollout.max_tokens = {rules.max_tokens} tokens of prompt and "
            f"completion, got {len(prompt_ids)} and {num_tokens}; lower max_tokens in the "
            "function's requests, or raise rollout.max_tokens"
        )
    is_sampled = _read_mask(fields.pop(MASK_KEY, None), num_tokens, make_error)
    return RolloutRow(prompt_ids, completion_ids, logprobs, is_sampled, fields)


def _read_token_ids(key: str, tokens: Any, vocab_size: int, make_error: MakeError) -> list[int]:
    entries = _to_list(tokens)
    if not entries:
        raise make_error(f"expected a list of '{key}', got {tokens!r:.60}")
    for position, token_id in enumerate(entries):
        is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
        if not is_integer or not 0 <= token_id < vocab_size:
            raise make_error(
                f"expected '{key}' below {vocab_size}, the size of the vocabulary, got "
                f"{token_id!r:.40} at position {position}"
            )
    return [int(token_id) for token_id in entries]


def _read_logprobs(returned_logprobs: Any, make_error: MakeError) -> list[float]:
    """Return [T] log-probs of the sampled tokens; newer servers nest each one in a list."""
    entries = _to_list(returned_logprobs)
    if entries is None:
        raise make_error(f"expected a list of 'logprobs', got {returned_logprobs!r:.60}")
    logprobs = []
    for position, entry in enumerate(entries):
        entry_list = _to_list(entry) or ()
        logprob = entry_list[0] if len(entry_list) == 1 else entry
        if not isinstance(logprob, Real) or not -math.inf < float(logprob) <= _MAX_LOGPROB:
            raise make_error(
                f"expected one finite log-prob of 0 or below for each token, got {entry!r:.40} at "
                f"position {position}"
            )
        logprobs.append(float(logprob))
    return logprobs


def _read_mask(mask: Any, num_tokens: int, make_error: MakeError) -> list[bool]:
    if mask is None:
        return [True] * num_tokens
    entries = _to_list(mask)
    if entries is None or len(entries) != num_tokens or any(flag not in (0, 1) for flag in entries):
        raise make_error(
            f"expected {num_tokens} values of '{MASK_KEY}', 1 for a sampled token and 0 for a "
            f"token of the environment, got {mask!r:.60}"
        )
    if not any(entries):
        raise make_error(f"expected at least one sampled token, got an '{MASK_KEY}' of only zeros")
    return [bool(flag) for flag in entries]


def _to_list(sequence: Any) -> Sequence[Any] | None:
    """Return a list, tuple, array or tensor as a list; None for any other value."""
    if isinstance(sequence, (list, tuple, range)):
        return sequence
    values = sequence.tolist() if hasattr(sequence, "tolist") else None
    return values if isinstance(values, list) else None


@dataclass(frozen=True, slots=True)
class RowCheck:
    """A check that compares a call's rows with the engine."""

    engine: AsyncEngine
    call: RolloutCall
    sampling: Sampling | None
    """Settings with which every trained token must be sampled; None in an evaluation."""
    max_logprob_error: float
    rules: RowRules

    async def run(self, index: int, row: RolloutRow) -> RolloutRow:
        """Return the row with its policy version if its log-probs are those of the engine."""
        policy_version, make_error = self.engine.version, partial(self.rules.make_row_error, index)
        for start, end in row.sampled_spans:
            prompt_ids = [*row.prompt_ids, *row.completion_ids[:start]]
            token_ids, logprobs = row.completion_ids[start:end], row.logprobs[start:end]
            record = self.call.find(prompt_ids, token_ids)
            if record is not None:
                policy_version = min(policy_version, record.completion.policy_version)
                engine_logprobs = record.completion.logprobs[: len(token_ids)]
                self._compare_sampling(record.sampling, make_error)
            elif self.sampling is None:
                continue
            else:
                engine_logprobs = await self._score(
                    prompt_ids, token_ids, self.sampling, make_error
                )
            self._compare_logprobs(logprobs, engine_logprobs, start, make_error)
        return replace(row, policy_version=policy_version)

    async def _score(
        self, prompt_ids: list[int], token_ids: list[int], sampling: Sampling, make_error: MakeError
    ) -> list[float]:
        """Return the engine's log-probs of tokens that it did not sample in this call."""
        if sampling.temperature != 1 or not sampling.changes_only_temperature:
            raise make_error(
                f"the {len(token_ids)} tokens after the first {len(prompt_ids)} were not sampled "
                "in this call. Their log-probs can only be checked at temperature 1 without cuts "
                "or penalties; return the engine's completions after the tokens that were sent"
            )
        return (await self.engine.score([ScoringRequest(prompt_ids, token_ids)]))[0]

    def _compare_logprobs(
        self, logprobs: list[float], engine_logprobs: list[float], start: int, make_error: MakeError
    ) -> None:
        pairs = zip(logprobs, engine_logprobs, strict=True)
        for number, (logprob, engine_logprob) in enumerate(pairs, start):
            if abs(logprob - engine_logprob) > self.max_logprob_error:
                raise make_error(
                    f"the log-prob of completion token {number} is {logprob:.4f}, but the "
                    f"engine's log-prob after the same tokens is {engine_logprob:.4f}; return the "
                    "engine's log-probs and, in prompt_ids and completion_ids, the tokens that it "
                    "saw, with env_mask 0 for tokens that it did not sample"
                )

    def _compare_sampling(self, sampling: Sampling, make_error: MakeError) -> None:
        """Refuse tokens that were sampled with other settings than those of the run."""
        for name in SAMPLING_FIELDS:
            value, run_value = getattr(sampling, name), getattr(self.sampling or sampling, name)
            if value != run_value:
                raise make_error(
                    f"was sampled with {name} = {value:g}, but the run trains with {name} = "
                    f"{run_value:g}; use args.{name}, or change the configuration"
                )

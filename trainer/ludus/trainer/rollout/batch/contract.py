"""What a rollout function of TRL's is called with, and what it must return.

    form                                        prompts             rows that it returns
    (prompts, args, processing_class)           each once, as text  num_generations per prompt
    (prompts, images, args, processing_class)   each once, as text  num_generations per prompt
    (prompts, trainer)                          num_generations     one per prompt
                                                times each

    row:  prompt_ids  completion_ids  logprobs  [env_mask]  any other key: a column of rewards

Parameter names tell the forms apart; TRL had them one after the other. Whatever is returned is
checked row by row before anything is learned from it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from numbers import Integral, Real
from typing import Any

from ludus.proto.errors import ConfigError, RolloutFunctionError
from ludus.trainer.rollout.reward_function import OWN_ARGUMENTS

REQUIRED_KEYS = ("prompt_ids", "completion_ids", "logprobs")
MASK_KEY = "env_mask"
_MAX_LOGPROB = 1e-6
"""Of a probability of 1, where it was rounded."""


class Form(Enum):
    """A signature, by the names of the parameters after the prompts."""

    ONCE = ("args", "processing_class")
    ONCE_WITH_IMAGES = ("images", "args", "processing_class")
    REPEATED = ("trainer",)

    @property
    def repeats_prompts(self) -> bool:
        """Whether each prompt comes as often as it is to be answered."""
        return self is Form.REPEATED


def form_of(function: Callable[..., Any], path: str) -> Form:
    """The form of the rollout function that the configuration names `path`.

    Raises:
        ConfigError: it has none of the three.
    """
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"environment.rollout = 'trl:{path}' expected a plain function, which runs in a "
            "thread, got a coroutine function; write `def`, or play single episodes with "
            f"rollout = '{path}' (docs/rewards.md)"
        )
    parameters = list(inspect.signature(function).parameters.values())
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters[1:] if p.default is p.empty and p.kind not in kinds]
    for form in Form:
        if parameters and sorted(needed) == sorted(form.value):
            return form
    named = {p.name for p in parameters[1:]}
    for form in Form:
        # A parameter of a form may have a default.
        if set(needed) <= set(form.value) <= named:
            return form
    raise ConfigError(
        f"environment.rollout = 'trl:{path}' expected one of the signatures "
        + ", ".join(f"(prompts, {', '.join(form.value)})" for form in Form)
        + f", got ({', '.join(p.name for p in parameters)}); rename its parameters"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One episode as a rollout function returned it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    """[T] what the policy sampled, and what the environment said in between."""
    logprobs: list[float]
    """[T]"""
    is_sampled: list[bool]
    """[T] False where the environment speaks."""
    fields: Mapping[str, Any]
    """Its entries of all other keys."""

    @property
    def sampled_spans(self) -> Iterator[tuple[int, int]]:
        """Where in `completion_ids` each answer begins, and one past its end."""
        begin = 0
        for is_sampled, tokens in groupby(self.is_sampled):
            end = begin + sum(1 for _ in tokens)
            if is_sampled:
                yield begin, end
            begin = end


@dataclass(frozen=True, slots=True)
class Expected:
    """What the rows of one call must fit."""

    path: str
    """Of the function."""
    num_prompts: int
    num_generations: int
    vocab_size: int
    max_tokens: int
    """Of prompt and completion together."""

    @property
    def num_rows(self) -> int:
        """Of the batch."""
        return self.num_prompts * self.num_generations

    def error(self, what: str) -> RolloutFunctionError:
        """What to raise of the function."""
        return RolloutFunctionError(f"rollout function '{self.path}' {what}")

    def row_error(self, row: int, what: str) -> RolloutFunctionError:
        """What to raise of one of its rows."""
        prompt, number = divmod(row, self.num_generations)
        return self.error(f"row {row} (prompt {prompt}, completion {number}): {what}")


def read_rows(returned: Any, expected: Expected) -> list[Row]:
    """The rows of what a rollout function returned, prompt by prompt.

    Prompt tokens may come once per prompt, as a server of `trl vllm-serve` answers.

    Raises:
        RolloutFunctionError: a key is missing or taken, there are more or fewer rows, or one is
            faulty.
    """
    if not isinstance(returned, Mapping):
        raise expected.error(f"expected to return a dictionary, got {returned!r:.100}")
    missing = [key for key in REQUIRED_KEYS if returned.get(key) is None]
    if missing:
        raise expected.error(
            f"expected the keys {list(REQUIRED_KEYS)}, got {sorted(map(str, returned))} without "
            f"{missing}; return what the engine answered"
        )
    hidden = sorted(OWN_ARGUMENTS.intersection(returned) - set(REQUIRED_KEYS))
    if hidden:
        raise expected.error(
            f"expected other keys than {hidden}, under which reward functions get what the trainer "
            "says; rename them"
        )
    columns = {str(key): _column(key, value, expected) for key, value in returned.items()}
    masks = columns.pop(MASK_KEY, None)
    of_tokens = {key: columns.pop(key) for key in REQUIRED_KEYS}
    return [
        _row(
            number,
            {key: values[number] for key, values in of_tokens.items()},
            None if masks is None else masks[number],
            {key: values[number] for key, values in columns.items()},
            expected,
        )
        for number in range(expected.num_rows)
    ]


def _column(key: Any, value: Any, expected: Expected) -> Sequence[Any]:
    """One entry per row; a value that is no list is every row's."""
    listed = _listed(value)
    if listed is None:
        if key in (*REQUIRED_KEYS, MASK_KEY) or isinstance(value, Iterator):
            raise expected.error(f"expected '{key}' to be a list, got {value!r:.100}")
        return [value] * expected.num_rows
    if key == "prompt_ids" and len(listed) == expected.num_prompts:
        return [ids for ids in listed for _ in range(expected.num_generations)]
    if len(listed) != expected.num_rows:
        raise expected.error(
            f"expected {expected.num_rows} entries of '{key}', num_generations = "
            f"{expected.num_generations} for each of {expected.num_prompts} prompts, got "
            f"{len(listed)}"
        )
    return listed


def _row(
    number: int,
    of_tokens: Mapping[str, Any],
    mask: Any,
    fields: Mapping[str, Any],
    expected: Expected,
) -> Row:
    """Row `number`; `of_tokens` are its entries of the required keys."""
    prompt_ids, completion_ids = (
        _token_ids(key, of_tokens[key], number, expected)
        for key in ("prompt_ids", "completion_ids")
    )
    logprobs = _logprobs(of_tokens["logprobs"], number, expected)
    num_tokens = len(completion_ids)
    if len(logprobs) != num_tokens:
        raise expected.row_error(
            number,
            f"expected {num_tokens} logprobs, one per completion id, got {len(logprobs)}",
        )
    if len(prompt_ids) + num_tokens > expected.max_tokens:
        raise expected.row_error(
            number,
            f"expected at most rollout.max_tokens = {expected.max_tokens} tokens of prompt and "
            f"completion, got {len(prompt_ids)} and {num_tokens}; lower max_tokens of what the "
            "function samples, or raise rollout.max_tokens",
        )
    is_sampled = _mask(mask, num_tokens, number, expected)
    return Row(prompt_ids, completion_ids, logprobs, is_sampled, fields)


def _token_ids(key: str, value: Any, number: int, expected: Expected) -> list[int]:
    listed = _listed(value)
    if not listed:
        raise expected.row_error(number, f"expected a list of '{key}', got {value!r:.60}")
    for place, token_id in enumerate(listed):
        is_complete_env_error = isinstance(token_id, Integral) and not isinstance(token_id, bool)
        if not is_complete_env_error or not 0 <= token_id < expected.vocab_size:
            raise expected.row_error(
                number,
                f"expected '{key}' below {expected.vocab_size}, the size of the vocabulary, got "
                f"{token_id!r:.40} at place {place}",
            )
    return [int(token_id) for token_id in listed]


def _logprobs(value: Any, number: int, expected: Expected) -> list[float]:
    """[T] of the sampled tokens; later servers give the likeliest ones of each token first."""
    listed = _listed(value)
    if listed is None:
        raise expected.row_error(number, f"expected a list of 'logprobs', got {value!r:.60}")
    found = []
    for place, entry in enumerate(listed):
        nested = _listed(entry)
        logprob = nested[0] if nested is not None and len(nested) == 1 else entry
        if not isinstance(logprob, Real) or not -math.inf < float(logprob) <= _MAX_LOGPROB:
            raise expected.row_error(
                number,
                f"expected one finite log-prob of 0 or below for each token, got {entry!r:.40} at "
                f"place {place}",
            )
        found.append(float(logprob))
    return found


def _mask(value: Any, num_tokens: int, number: int, expected: Expected) -> list[bool]:
    if value is None:
        return [True] * num_tokens
    listed = _listed(value)
    if listed is None or len(listed) != num_tokens or any(one not in (0, 1) for one in listed):
        raise expected.row_error(
            number,
            f"expected '{MASK_KEY}' to be {num_tokens} times 1 (sampled) or 0 (said by the "
            f"environment), one per completion id, got {value!r:.60}",
        )
    if not any(listed):
        raise expected.row_error(
            number, f"expected a sampled token, got an '{MASK_KEY}' of zeros alone"
        )
    return [bool(one) for one in listed]


def _listed(value: Any) -> Sequence[Any] | None:
    """A list, tuple, array or tensor as a list; None for what is none."""
    if isinstance(value, (list, tuple, range)):
        return value
    plain = value.tolist() if hasattr(value, "tolist") else None
    return plain if isinstance(plain, list) else None

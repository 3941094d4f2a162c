"""What the values of GRPOConfig's fields are: TRL itself looks at few of them before it computes.

default, or a table below --> kind --> the value is one, or is refused by the field's name
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.fields import MAPPED


@dataclass(frozen=True, slots=True)
class _Kind:
    """Values of one kind."""

    said: str
    holds: Callable[[Any], bool]
    """Whether a value is one of them."""


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


_FLAG = _Kind("True or False", lambda value: isinstance(value, bool))
_NUMBER = _Kind("a finite number", _is_number)
_WHOLE = _Kind("a whole number", _is_whole)
_COUNT = _Kind("a whole number of 1 or more", lambda value: _is_whole(value) and value >= 1)
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_PATH = _Kind("a path", lambda value: isinstance(value, (str, os.PathLike)))
_OPTIONS = _Kind("a dictionary", lambda value: isinstance(value, Mapping))
_NUMBERS = _Kind(
    "a list of numbers",
    lambda value: isinstance(value, (list, tuple)) and all(map(_is_number, value)),
)
_SCALE = _Kind("a text, True or False", lambda value: isinstance(value, (str, bool)))
_ANY = _Kind("anything", lambda value: True)

_KINDS: Mapping[str, _Kind] = {
    "output_dir": _PATH,
    "bf16": _FLAG,
    "report_to": _Kind("a text, or a list", lambda value: isinstance(value, (str, list, tuple))),
    "scale_rewards": _SCALE,
    "chat_template_kwargs": _OPTIONS,
    "reward_weights": _NUMBERS,
    "vllm_server_base_url": _TEXT,
    "resume_from_checkpoint": _ANY,
    "max_steps": _WHOLE,
    "vllm_server_port": _WHOLE,
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"),
            *("generation_batch_size", "steps_per_generation"),
            *("num_generations", "num_generations_eval", "max_completion_length"),
            *("vllm_tensor_parallel_size", "num_completions_to_print"),
        ),
        _COUNT,
    ),
}
"""Of fields whose default does not say it."""
_MAY_BE_NONE = frozenset(
    {
        *("top_k", "max_grad_norm", "max_completion_length", "report_to"),
        *("vllm_importance_sampling_clip_max",),
        *(name for name, default in MAPPED.items() if default is None),
    }
)


def check_value(name: str, value: Any) -> None:
    """Check that a field which a setting follows from has a value of its kind.

    Raises:
        ConfigError: it has not.
    """
    if name not in MAPPED or (value is None and name in _MAY_BE_NONE):
        return
    kind = _KINDS.get(name) or _kind_of(MAPPED[name])
    if not kind.holds(value):
        raise ConfigError(f"GRPOConfig.{name} expected {kind.said}, got {value!r:.60}")


def _kind_of(default: Any) -> _Kind:
    if isinstance(default, bool):
        return _FLAG
    return _TEXT if isinstance(default, str) else _NUMBER

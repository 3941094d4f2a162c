"""Checks of the values of GRPOConfig's fields.

default, or the table below --> kind --> the value has this kind, or the field is refused

The ranges are those of the run's settings. Checked here, the errors use TRL's names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.settings.fields import MAPPED


@dataclass(frozen=True, slots=True)
class _Kind:
    """A set of valid values."""

    description: str
    contains: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


_FLAG = _Kind("True or False", lambda value: isinstance(value, bool))
_NUMBER = _Kind("a finite number", _is_number)
_INTEGER = _Kind("a whole number", _is_integer)
_COUNT = _Kind("a whole number of 1 or more", lambda value: _is_integer(value) and value >= 1)
_COUNT_FROM_0 = _Kind(
    "a whole number of 0 or more", lambda value: _is_integer(value) and value >= 0
)
_ABOVE_0 = _Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_FROM_0 = _Kind("a number of 0 or more", lambda value: _is_number(value) and value >= 0)
_ABOVE_1 = _Kind("a number above 1", lambda value: _is_number(value) and value > 1)
_SHARE = _Kind("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1)
_BELOW_1 = _Kind("a number from 0, below 1", lambda value: _is_number(value) and 0 <= value < 1)
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_PATH = _Kind("a path", lambda value: isinstance(value, (str, os.PathLike)))
_OPTIONS = _Kind("a dictionary", lambda value: isinstance(value, Mapping))
_NUMBERS = _Kind(
    "a list of numbers",
    lambda value: isinstance(value, (list, tuple)) and all(map(_is_number, value)),
)
_CAP = _Kind("a number of 1 or more", lambda value: _is_number(value) and value >= 1)
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
    "max_steps": _INTEGER,
    "save_total_limit": _INTEGER,
    "top_k": _Kind("a whole number", lambda value: _is_integer(value) and value >= -1),
    "num_generations": _Kind(
        "a whole number of 2 or more, because completions of a prompt are compared",
        lambda value: _is_integer(value) and value >= 2,
    ),
    "warmup_steps": _Kind(
        "a whole number of 0 or more, or a share of all steps below 1",
        lambda value: _is_number(value) and value >= 0 and (value < 1 or value % 1 == 0),
    ),
    "max_grad_norm": _Kind(
        "a number above 0 (a large one disables clipping)", lambda value: _ABOVE_0.contains(value)
    ),
    "vllm_server_port": _Kind(
        "a port, from 0 to 65535", lambda value: _is_integer(value) and 0 <= value <= 65535
    ),
    "delta": _ABOVE_1,
    "vllm_importance_sampling_clip_min": _Kind(
        "a number above 0, below 1", lambda value: _is_number(value) and 0 < value < 1
    ),
    **dict.fromkeys(("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"), _CAP),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "min_p"), _BELOW_1),
    "temperature": _Kind(
        "a number of 0.01 or more", lambda value: _is_number(value) and value >= 0.01
    ),
    "repetition_penalty": _Kind(
        "a number from 0.01 to 100", lambda value: _is_number(value) and 0.01 <= value <= 100
    ),
    **dict.fromkeys(("top_p", "epsilon", "learning_rate", "vllm_gpu_memory_utilization"), _SHARE),
    **dict.fromkeys(("weight_decay", "beta", "entropy_coef"), _FROM_0),
    **dict.fromkeys(("seed", "data_seed", "max_tool_calling_iterations"), _COUNT_FROM_0),
    **dict.fromkeys(
        (*("adam_epsilon", "epsilon_high", "num_train_epochs"),),
        _ABOVE_0,
    ),
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"),
            *("generation_batch_size", "steps_per_generation"),
            *("num_generations_eval", "max_completion_length", "vllm_max_model_length"),
            *("vllm_tensor_parallel_size", "num_completions_to_print"),
        ),
        _COUNT,
    ),
}
"""Kinds of the fields whose default does not determine the kind."""
_OPTIONAL = frozenset(
    {
        *("top_k", "max_grad_norm", "max_completion_length", "report_to"),
        *("vllm_importance_sampling_clip_max",),
        *(name for name, default in MAPPED.items() if default is None),
    }
)


def check_value(name: str, value: Any) -> None:
    """Check the value of a mapped field.

    Raises:
        ConfigError: the value is invalid.
    """
    if name not in MAPPED or (value is None and name in _OPTIONAL):
        return
    kind = _KINDS.get(name) or _default_kind(MAPPED[name])
    if not kind.contains(value):
        raise ConfigError(f"GRPOConfig.{name} must be {kind.description}, but it is {value!r:.60}")


def _default_kind(default: Any) -> _Kind:
    if isinstance(default, bool):
        return _FLAG
    return _TEXT if isinstance(default, str) else _NUMBER

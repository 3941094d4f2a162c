"""Types and ranges of the supported Forge keys.

key --KINDS--> type --pydantic--> a valid value, or an error that names the key in the file

The ranges are those of the run's settings. They are repeated here so that errors use Forge's names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ludus.proto.config.section import (
    DecayRate,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Temperature,
)
from ludus.proto.errors import ConfigError

Model = Annotated[
    str, Field(min_length=1, description="text: a folder, or a Hugging Face model id")
]
Text = Annotated[str, Field(description="text")]
AtLeastTwo = Annotated[int, Field(ge=2)]
"""Number of episodes in a group, or of tokens in a sequence with prompt and completion."""
Share = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["bfloat16", "float32"]

_ENGINES = tuple(f"policy.{name}." for name in ("engine_args", "engine_config"))
_SAMPLINGS = tuple(f"policy.{name}." for name in ("sampling_params", "sampling_config"))
_MODELS = ("trainer", "ref_model")

UNSUPPORTED_DEGREES = tuple(
    f"{part}.parallelism.{kind}_degree"
    for part in _MODELS
    for kind in (
        *("data_parallel_replicate", "tensor_parallel", "pipeline_parallel"),
        *("context_parallel", "expert_parallel", "expert_tensor_parallel"),
    )
)
"""Degrees of kinds of parallelism that are not supported; all must be 1."""

KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("group_size", "grpo.group_size"), AtLeastTwo),
    **dict.fromkeys(
        ("max_seq_len", "blackjack_env.max_seq_len", "trainer.training.seq_len"), AtLeastTwo
    ),
    **dict.fromkeys(
        (
            *("local_batch_size", "batch_size", "max_req_tokens", "max_res_tokens"),
            *("replay_buffer.batch_size", "replay_buffer.dp_size", "rollout_threads"),
            *("trainer.training.local_batch_size", "trainer.training.steps"),
            *("trainer.checkpoint.interval", "trainer.checkpoint.keep_latest_k"),
            "trainer.parallelism.data_parallel_shard_degree",
            *("actors.trainer.procs", "services.policy.num_replicas", "blackjack_env.max_turns"),
            *UNSUPPORTED_DEGREES,
        ),
        PositiveInt,
    ),
    **dict.fromkeys(
        ("off_by_n", "replay_buffer.max_policy_age", "trainer.lr_scheduler.warmup_steps"),
        NonNegativeInt,
    ),
    "trainer.optimizer.lr": LearningRate,
    **dict.fromkeys(("trainer.optimizer.beta1", "trainer.optimizer.beta2"), DecayRate),
    **dict.fromkeys(("trainer.optimizer.eps", "trainer.training.max_norm"), PositiveFloat),
    "trainer.optimizer.weight_decay": NonNegativeFloat,
    "trainer.lr_scheduler.min_lr_factor": Annotated[float, Field(ge=0, le=1)],
    "trainer.lr_scheduler.decay_type": Literal["constant", "linear", "cosine"],
    "trainer.training.dtype": Dtype,
    "trainer.activation_checkpoint.mode": Literal["none", "selective", "full"],
    **dict.fromkeys(
        (
            *("trainer.checkpoint.enable", "trainer.compile.enable"),
            *("services.policy.with_gpus", "actors.trainer.with_gpus"),
        ),
        bool,
    ),
    **dict.fromkeys(
        (
            *("model", "blackjack_env.model", "dataset.model"),
            *(f"{part}.model.hf_assets_path" for part in _MODELS),
            *(f"{part}.checkpoint.initial_load_path" for part in _MODELS),
            *(f"{engine}model" for engine in _ENGINES),
        ),
        Model,
    ),
    **dict.fromkeys(
        (
            *("blackjack_env.server_url", "blackjack_env.game_name"),
            *("metric_logging.wandb.project", "metric_logging.wandb.entity"),
        ),
        Text,
    ),
    **{
        f"{engine}{name}": kind
        for engine in _ENGINES
        for name, kind in {
            "dtype": Literal["auto", "bfloat16", "float32"],
            "enforce_eager": bool,
            "gpu_memory_utilization": Share,
            "max_model_len": AtLeastTwo,
            "max_num_seqs": PositiveInt,
            "pipeline_parallel_size": PositiveInt,
            "tensor_parallel_size": PositiveInt,
        }.items()
    },
    **{
        f"{sampling}{name}": kind
        for sampling in _SAMPLINGS
        for name, kind in {
            "n": PositiveInt,
            "max_tokens": PositiveInt,
            "temperature": Temperature,
            "top_p": Share,
            "top_k": NonNegativeInt,
            "min_p": Annotated[float, Field(ge=0, lt=1)],
            "repetition_penalty": Annotated[float, Field(ge=0.01, le=100)],
        }.items()
    },
}
"""Type of each key. Values of other keys are ignored or checked elsewhere."""

ALL = -1
"""Value that means all: tokens in top_k, steps, or shards."""
_VALUES_FOR_ALL: Mapping[str, int] = {
    "trainer.training.steps": ALL,
    "trainer.parallelism.data_parallel_shard_degree": ALL,
    "replay_buffer.dp_size": ALL,
    "trainer.checkpoint.keep_latest_k": 0,
    **{f"{sampling}top_k": ALL for sampling in _SAMPLINGS},
}
"""Value outside the range that means all, by key."""


def check_value(key: str, value: Any, *, source_key: str) -> Any:
    """Convert the value of a key to its type; text that contains a number becomes a number.

    Args:
        source_key: the key to name in errors, if this key refers to another.

    Raises:
        ConfigError: the value has another type or is out of range.
    """
    kind = KINDS.get(key)
    if kind is None or value is None:
        return value
    if key in _VALUES_FOR_ALL and str(value) == str(_VALUES_FOR_ALL[key]):
        return _VALUES_FOR_ALL[key]
    is_misplaced_bool = isinstance(value, bool) and kind is not bool
    try:
        if not is_misplaced_bool:
            return _adapter(kind).validate_python(_plain(value), strict=kind is bool or None)
    except ValidationError:
        pass
    alternative = f", or {_VALUES_FOR_ALL[key]} for all" if key in _VALUES_FOR_ALL else ""
    raise ConfigError(f"{source_key} = {value!r:.80} must be {_describe(kind)}{alternative}")


def _plain(value: Any) -> Any:
    """Convert numpy numbers and paths, which a mapping may contain, to plain values."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, np.generic) else value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def _describe(kind: Any) -> str:
    """Describe the values of a type: "a number above 0, at most 1"."""
    if kind is bool:
        return "true or false"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    base, *notes = get_args(kind)
    fields = [note for note in notes if isinstance(note, FieldInfo)]
    description = next((field.description for field in fields if field.description), None)
    number = "a whole number" if base is int else "a number"
    bounds = (_describe_bound(bound) for field in fields for bound in field.metadata)
    return description or number + "".join(bounds)


def _describe_bound(bound: Any) -> str:
    match bound:
        case Gt(gt=limit):
            return f" above {limit}"
        case Ge(ge=limit):
            return f" of {limit} or more"
        case Lt(lt=limit):
            return f", below {limit}"
        case Le(le=limit):
            return f", at most {limit}"
    raise NotImplementedError(f"no description for {bound!r}")

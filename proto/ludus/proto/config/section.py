"""The base class of every configuration section, and the types that fields share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
)

from ludus.proto.paths import expand_home


class Section(BaseModel):
    """A frozen group of fields.

    Unknown keys are errors. The docstring under a field is its help text.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    _expand_home = field_validator("*")(expand_home)


IMPORT_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
ROLLOUT_PATTERN = r"^([A-Za-z_]\w*:)?[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
ImportPath = Annotated[str, StringConstraints(pattern=IMPORT_PATTERN)]
"""Name of a Python object: "module:attribute"."""

RolloutPath = Annotated[str, StringConstraints(pattern=ROLLOUT_PATTERN)]
"""Name of a rollout function: "module:attribute", or "RUNNER:module:attribute"."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""Duration in seconds, at most about 30 years: torch, Ray and the storage clients cannot
represent longer timeouts."""
NumThreads = Annotated[int, Field(ge=1, le=1024)]
"""Number of torch threads. torch aborts the process if the machine cannot start that many."""
LearningRate = Annotated[float, Field(gt=0, le=1)]
"""Learning rate of Adam, which is about the size of one update of a weight. An update above 1
replaces the weight instead of changing it."""
DecayRate = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a running mean. A rate of 1 would ignore all new values."""
MIN_TEMPERATURE = 0.01
"""Lowest sampling temperature: vLLM accepts no lower one, and dividing logits by a smaller number
results in infinity or NaN."""
MAX_VLLM_TEMPERATURE = 2.0
RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,46}$"
"""Regular expression for the name of a run, which is also the name of its folder."""
LogLevel = Literal["debug", "info", "warning", "error"]
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE)]


def _check_gpu_share(num_gpus: float) -> float:
    if num_gpus > 1 and num_gpus % 1:
        raise ValueError(
            f"expected a share of one GPU or a whole number of GPUs, got {num_gpus:g}; Ray cannot "
            "reserve anything else"
        )
    return num_gpus


NumGpus = Annotated[float, Field(ge=0), AfterValidator(_check_gpu_share)]


def assume_kind(kind: str) -> BeforeValidator:
    """Return a validator that reads a section without `kind` as the variant `kind`."""

    def add_kind(section: Any) -> Any:
        return {"kind": kind, **section} if isinstance(section, dict) else section

    return BeforeValidator(add_kind)

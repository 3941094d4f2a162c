"""The base of every configuration section, and the types that its fields share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)


class Section(BaseModel):
    """A frozen group of fields; an unknown key is an error, the text under a field its help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


ImportPath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
"""A Python object by name: "module:attribute"."""

RolloutPath = Annotated[str, StringConstraints(pattern=r"^(trl:)?[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
"""A rollout function by name: "module:attribute", or "trl:module:attribute" for one of TRL's."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""Thirty years at most: what torch, Ray and clients of stores wait by holds no more."""
NumThreads = Annotated[int, Field(ge=1, le=1024)]
"""Of torch: where a machine cannot start as many, the process is aborted."""
LearningRate = Annotated[float, Field(gt=0, le=1)]
"""Adam moves a weight by about so much in a step: above 1 nothing is left of what it was."""
DecayRate = Annotated[float, Field(ge=0, lt=1)]
"""Of a running mean; 1 would never take anything in."""
LOWEST_TEMPERATURE = 0.01
"""vLLM samples at no lower one, and logits that are divided by less are no numbers any more."""
HIGHEST_VLLM_TEMPERATURE = 2.0
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,46}$"
"""What a run, and its folder, may be called."""
Temperature = Annotated[float, Field(ge=LOWEST_TEMPERATURE)]


def _whole_above_1(num_gpus: float) -> float:
    if num_gpus > 1 and num_gpus % 1:
        raise ValueError(
            f"expected a share of one GPU or a whole number of them, got {num_gpus:g}: Ray gives "
            "nothing else"
        )
    return num_gpus


NumGpus = Annotated[float, Field(ge=0), AfterValidator(_whole_above_1)]


def default_kind(kind: str) -> BeforeValidator:
    """A validator that reads a section without `kind` as the variant `kind`."""

    def fill_in(value: Any) -> Any:
        return {"kind": kind, **value} if isinstance(value, dict) else value

    return BeforeValidator(fill_in)

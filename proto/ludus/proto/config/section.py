"""The base of every configuration section, and the types that its fields share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints


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


def default_kind(kind: str) -> BeforeValidator:
    """A validator that reads a section without `kind` as the variant `kind`."""

    def fill_in(value: Any) -> Any:
        return {"kind": kind, **value} if isinstance(value, dict) else value

    return BeforeValidator(fill_in)

"""OpenEnv's actions, observations and states as ours: pydantic models or dataclasses.

    JSON --ForeignAction--> checked by the foreign type, kept as `.foreign`
    foreign observation --fields_of--> JSON fields --> ForeignObservation

The schemas that servers publish are the foreign types' own.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    PydanticSchemaGenerationError,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticSerializationError

from ludus.env.types import Action, JsonObject, Observation, State

_MAX_REPR = 200
_ANY_OBJECT: JsonObject = {"type": "object", "properties": {"metadata": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A foreign type."""

    read: Callable[[JsonObject], Any]
    """An instance of JSON; raises ValueError (pydantic's included) where it does not fit."""
    schema: JsonObject


class _Foreign(BaseModel):
    model: ClassVar[ForeignModel]

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> JsonObject:
        """The foreign type's own schema."""
        return cls.model.schema


class ForeignAction(_Foreign, Action):
    """An action whose fields the foreign type checks."""

    model_config = ConfigDict(extra="allow")

    _foreign: Any = PrivateAttr(default=None)

    @property
    def foreign(self) -> Any:
        """The action that the environment gets."""
        return self._foreign

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        action = validate(data)
        if isinstance(data, dict):
            action._foreign = cls.model.read(data)
        return action


class ForeignObservation(_Foreign, Observation):
    """An observation with the foreign type's fields, but for reward and done."""

    model_config = ConfigDict(extra="allow")


class ForeignState(_Foreign, State):
    """A state with the foreign type's fields."""

    model_config = ConfigDict(extra="allow")


def foreign_model(kind: Any, read: Callable[[JsonObject], Any] | None = None) -> ForeignModel:
    """How a foreign type is read and described; any object where there is no type.

    Args:
        read: where there is another way to read it than its own.
    """
    if is_model(kind):
        return ForeignModel(read or kind.model_validate, _schema_of(kind.model_json_schema))
    if dataclasses.is_dataclass(kind):
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(kind)
        except PydanticSchemaGenerationError:  # a field of a kind that pydantic does not know
            return ForeignModel(lambda data: _built(kind, data), _ANY_OBJECT)
        return ForeignModel(adapter.validate_python, _schema_of(adapter.json_schema))
    return ForeignModel(lambda data: data, _ANY_OBJECT)


def is_model(kind: Any) -> bool:
    """True for classes of pydantic models."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def observation_schema(schema: JsonObject) -> JsonObject:
    """The schema without reward and done, which travel beside the observation."""
    properties = {"metadata": {"type": "object"}, **schema.get("properties", {})}
    beside = ("reward", "done")
    return {
        **schema,
        "properties": {name: one for name, one in properties.items() if name not in beside},
        "required": [name for name in schema.get("required", []) if name not in beside],
    }


def fields_of(value: Any) -> JsonObject:
    """The fields of a foreign observation or state as JSON."""
    if isinstance(value, BaseModel):
        try:
            return value.model_dump(mode="json")
        except PydanticSerializationError:  # arrays in a field of type Any
            return _json(value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return _json(value)
    return {name: _json(item) for name, item in vars(value).items() if not name.startswith("_")}


def _json(value: Any) -> Any:
    """Plain JSON; what has no JSON form becomes its (short) text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return _json(value.value)
    if isinstance(value, np.generic) or hasattr(value, "tolist"):  # arrays, tensors
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json(item) for item in value]
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return fields_of(value)
    return repr(value)[:_MAX_REPR]


def _built(kind: Any, data: JsonObject) -> Any:
    try:
        return kind(**data)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _schema_of(write: Callable[[], JsonObject]) -> JsonObject:
    try:
        return write()
    except ValueError:  # a field that JSON schema cannot describe
        return _ANY_OBJECT

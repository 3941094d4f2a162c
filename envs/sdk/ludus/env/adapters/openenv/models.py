"""Adapters for OpenEnv's actions, observations and states: pydantic models or dataclasses.

    JSON --ForeignAction--> validated by the foreign type, kept as `.foreign`
    foreign observation --read_fields--> JSON fields --> ForeignObservation

Servers publish the schemas of the foreign types.
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
class ForeignType:
    """A foreign type with its parser and its schema."""

    read: Callable[[JsonObject], Any]
    """Converts JSON to an instance, or raises ValueError, including pydantic's ValidationError."""
    schema: JsonObject


class _Foreign(BaseModel):
    model: ClassVar[ForeignType]

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> JsonObject:
        """Return the foreign type's schema."""
        return cls.model.schema


class ForeignAction(_Foreign, Action):
    """An action whose fields are validated by the foreign type."""

    model_config = ConfigDict(extra="allow")

    _foreign: Any = PrivateAttr(default=None)

    @property
    def foreign(self) -> Any:
        """The action for the foreign environment."""
        return self._foreign

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        action = validate(data)
        if isinstance(data, dict):
            action._foreign = cls.model.read(data)
        return action


class ForeignObservation(_Foreign, Observation):
    """An observation with the foreign type's fields, except reward and done."""

    model_config = ConfigDict(extra="allow")


class ForeignState(_Foreign, State):
    """A state with the foreign type's fields."""

    model_config = ConfigDict(extra="allow")


def read_foreign_type(kind: Any, read: Callable[[JsonObject], Any] | None = None) -> ForeignType:
    """Return the parser and schema of a foreign type, or of any object if there is no type.

    Args:
        read: parser that replaces the type's own parser.
    """
    if is_model(kind):
        return ForeignType(read or kind.model_validate, _read_schema(kind.model_json_schema))
    if dataclasses.is_dataclass(kind):
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(kind)
        except PydanticSchemaGenerationError:  # pydantic does not support the type of a field
            return ForeignType(lambda data: _construct(kind, data), _ANY_OBJECT)
        return ForeignType(adapter.validate_python, _read_schema(adapter.json_schema))
    return ForeignType(lambda data: data, _ANY_OBJECT)


def is_model(kind: Any) -> bool:
    """Return True for classes of pydantic models."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def observation_schema(schema: JsonObject) -> JsonObject:
    """Remove reward and done from a schema, because they are sent next to the observation."""
    properties = {"metadata": {"type": "object"}, **schema.get("properties", {})}
    removed = ("reward", "done")
    return {
        **schema,
        "properties": {name: part for name, part in properties.items() if name not in removed},
        "required": [name for name in schema.get("required", []) if name not in removed],
    }


def read_fields(value: Any) -> JsonObject:
    """Return the fields of a foreign observation or state as JSON."""
    if isinstance(value, BaseModel):
        try:
            return value.model_dump(mode="json")
        except PydanticSerializationError:  # arrays in a field of type Any
            return read_fields(value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _json(item) for name, item in value.items()}
    return {name: _json(item) for name, item in vars(value).items() if not name.startswith("_")}


def _json(value: Any) -> Any:
    """Convert a value to plain JSON; a value without a JSON form becomes a short text."""
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
        return read_fields(value)
    return repr(value)[:_MAX_REPR]


def _construct(kind: Any, data: JsonObject) -> Any:
    try:
        return kind(**data)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _read_schema(make_schema: Callable[[], JsonObject]) -> JsonObject:
    try:
        return make_schema()
    except ValueError:  # JSON schema cannot describe a field
        return _ANY_OBJECT

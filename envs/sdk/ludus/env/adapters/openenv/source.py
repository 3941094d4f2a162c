"""Sources of foreign environments, with their types: pydantic models or dataclasses.

    class        --> annotations of `step`, or type arguments of `Environment[...]`
    factory      --> the same of the class of the created environment
    application  --> the server object that `create_app` stored in its routes

    JSON --ForeignAction--> validated by the foreign type, kept as `.foreign`
    foreign observation --read_fields--> JSON fields --> ForeignObservation

Servers publish the schemas of the foreign types.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
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
from ludus.proto.errors import ConfigError

_ROOTS = ("openenv", "openenv_core")
_BASE_TYPES = ("Action", "Observation", "State")
_MCP_CLASS = "MCPEnvironment"
_MAX_CLOSURE_DEPTH = 4
_MAX_REPR = 200
Parser = Callable[[JsonObject], Any]
"""Converts JSON to an instance, or raises ValueError, including pydantic's ValidationError."""
_ANY_OBJECT: JsonObject = {"type": "object", "properties": {"metadata": {"type": "object"}}}


class _Foreign(BaseModel):
    foreign_schema: ClassVar[JsonObject]

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> JsonObject:
        """Return the foreign type's schema."""
        return cls.foreign_schema


class ForeignAction(_Foreign, Action):
    """An action whose fields are validated by the foreign type."""

    model_config = ConfigDict(extra="allow")

    read_foreign: ClassVar[Parser]

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
            action._foreign = cls.read_foreign(data)
        return action


class ForeignObservation(_Foreign, Observation):
    """An observation with the foreign type's fields, except reward and done."""

    model_config = ConfigDict(extra="allow")


class ForeignState(_Foreign, State):
    """A state with the foreign type's fields."""

    model_config = ConfigDict(extra="allow")


def _read_type(kind: Any) -> tuple[Parser, JsonObject]:
    """Return the parser and schema of a foreign type, or of any object if there is no type."""
    if is_model(kind):
        return kind.model_validate, _read_schema(kind.model_json_schema)
    if dataclasses.is_dataclass(kind):
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(kind)
        except PydanticSchemaGenerationError:  # pydantic does not support the type of a field
            return lambda content: _construct(kind, content), _ANY_OBJECT
        return adapter.validate_python, _read_schema(adapter.json_schema)
    return lambda content: content, _ANY_OBJECT


def is_model(kind: Any) -> bool:
    """Return True for classes of pydantic models."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _remove_reward(schema: JsonObject) -> JsonObject:
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


@dataclass(frozen=True, slots=True)
class OpenEnvSource:
    """A source of foreign environments of one class."""

    make: Callable[..., Any]
    kind: type[Any]
    read_action: Parser
    action_schema: JsonObject
    observation_schema: JsonObject
    state_schema: JsonObject
    list_tools: Callable[..., Any] | None
    """Type of the action that lists tools; None if the environment has no tools."""
    call_tool: Callable[..., Any] | None
    """Type of the action that calls a tool; None if the environment has no tools."""

    @property
    def reset_arguments(self) -> tuple[str, ...]:
        """The names of the arguments of `reset`."""
        parameters = self._reset_parameters.items()
        return tuple(name for name, parameter in parameters if parameter.kind in _NAMED)[1:]

    @property
    def takes_any_argument(self) -> bool:
        """True if `reset` accepts arguments with any name."""
        parameters = self._reset_parameters.values()
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def method(self, name: str) -> str:
        """Return the name of `reset` or `step`, or of its async form if the class defines it."""
        is_async = _is_overridden(self.kind, f"{name}_async")
        return f"{name}_async" if is_async else name

    @property
    def _reset_parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(getattr(self.kind, self.method("reset"))).parameters


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find_source(target: str, imported: Any) -> OpenEnvSource:
    """Return the source for the object that an `openenv:` target names.

    Raises:
        ConfigError: the object is not an environment class, a factory or an application.
    """
    if hasattr(imported, "routes"):
        return _read_app(target, imported)
    if not callable(imported):
        raise ConfigError(
            f"'{target}' must be an OpenEnv environment class, a function that creates an"
            f" environment, or the application of create_app; got {type(imported).__name__}"
        )
    kind = _find_class(imported)
    action, observation, state = _find_types(kind)
    if action is None:
        raise ConfigError(
            f"{kind.__name__}.step needs an annotation of its action type, as in"
            f" step(self, action: MyAction); add it, or name the application instead:"
            f" openenv:{kind.__module__.rpartition('.')[0] or kind.__module__}.app:app"
        )
    return _make_source(imported, kind, action, observation, state)


def _read_app(target: str, app: Any) -> OpenEnvSource:
    endpoints = [getattr(route, "endpoint", None) for route in app.routes]
    server = next((server for endpoint in endpoints for server in _search_closure(endpoint)), None)
    if server is None:
        raise ConfigError(
            f"'{target}' must be an application of OpenEnv's create_app, but its routes use no"
            " environment; name the class: openenv:module:Class"
        )
    make = getattr(server, "_env_factory", None)
    if make is None:  # OpenEnv 0.1 stores an instance
        make = type(server.env)
        _require_no_arguments(target, make)
    kind = _find_class(make)
    state = getattr(server, "state_cls", None)
    if state is None or state.__name__ in _BASE_TYPES:
        state = _find_types(kind)[2]
    return _make_source(make, kind, server.action_cls, server.observation_cls, state)


def _make_source(
    make: Callable[..., Any], kind: type[Any], action: Any, observation: Any, state: Any
) -> OpenEnvSource:
    mcp = next((base for base in kind.__mro__ if base.__name__ == _MCP_CLASS), None)
    names = vars(sys.modules[mcp.__module__]) if mcp is not None else {}
    read_action, action_schema = _read_type(action)
    may_vary = mcp is not None or getattr(observation, "__name__", "") in _BASE_TYPES
    return OpenEnvSource(
        make=make,
        kind=kind,
        read_action=_tool_reader(action, names) or read_action,
        action_schema=action_schema,
        observation_schema=(
            _ANY_OBJECT if may_vary else _remove_reward(_read_type(observation)[1])
        ),
        state_schema=_read_type(state)[1],
        list_tools=names.get("ListToolsAction"),
        call_tool=names.get("CallToolAction"),
    )


def _tool_reader(action: Any, names: dict[str, Any]) -> Parser | None:
    """Return a parser that also accepts tool actions, or None if the type does not allow them."""
    kinds = {"list_tools": names.get("ListToolsAction"), "call_tool": names.get("CallToolAction")}
    if action not in (names.get("Action"), *kinds.values()) or not is_model(action):
        return None

    def read(data: Any) -> Any:
        kind = kinds.get(data.get("type")) or action
        return kind.model_validate(data)

    return read


def _find_class(make: Callable[..., Any]) -> type[Any]:
    if inspect.isclass(make):
        return make
    sample = make()
    try:
        return type(sample)
    finally:
        close = getattr(sample, "close", None)
        if close is not None:
            close()


def _find_types(kind: type[Any]) -> tuple[Any, Any, Any]:
    """Return the types of action, observation and state; None for a type without declaration."""
    hints = _read_hints(kind.step) if hasattr(kind, "step") else {}
    state = inspect.getattr_static(kind, "state", None)
    state_hints = _read_hints(state.fget) if isinstance(state, property) else {}
    arguments = _type_arguments(kind)
    is_mcp = any(base.__name__ == _MCP_CLASS for base in kind.__mro__)
    annotations = (hints.get("action"), hints.get("return"), state_hints.get("return"))
    action, observation, state_type = (
        _choose_type(hint, arguments, index, is_mcp) for index, hint in enumerate(annotations)
    )
    return action, observation, state_type


def _choose_type(hint: Any, arguments: tuple[Any, ...], index: int, may_be_base: bool) -> Any:
    """Return the annotation, or the type argument if the annotation is only a base class."""
    argument = arguments[index] if index < len(arguments) else None
    for candidate in (hint, argument):
        if isinstance(candidate, type) and candidate.__name__ not in _BASE_TYPES:
            return candidate
    return hint if may_be_base and isinstance(hint, type) else None


def _read_hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # the annotations use names that only type checkers import
        return {}


def _type_arguments(kind: type[Any]) -> tuple[Any, ...]:
    for base in kind.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            arguments = typing.get_args(generic)
            if arguments and not isinstance(arguments[0], typing.TypeVar):
                return arguments
    return ()


def _is_overridden(kind: type[Any], name: str) -> bool:
    """Return True if a subclass of OpenEnv's base class defines the method."""
    return any(
        name in vars(base)
        for base in kind.__mro__
        if not (base.__name__ == "Environment" and base.__module__.split(".")[0] in _ROOTS)
    )


def _search_closure(function: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the server objects in the closure of a handler."""
    for cell in getattr(inspect.unwrap(function), "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
        has_environment = hasattr(value, "_env_factory") or hasattr(value, "env")
        if hasattr(value, "action_cls") and has_environment:
            yield value
        elif inspect.isfunction(value) and depth < _MAX_CLOSURE_DEPTH:
            yield from _search_closure(value, depth + 1)


def _require_no_arguments(target: str, kind: type[Any]) -> None:
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ConfigError(
            f"'{target}' contains one {kind.__name__}, and another cannot be created without"
            f" arguments ({error}); name a function that creates one: openenv:module:function"
        ) from None

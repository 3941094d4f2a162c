"""Sources of foreign environments, with their types: pydantic models or dataclasses.

    class        --> annotations of `step`, or type arguments of `Environment[...]`
    factory      --> the same, for the class of the environment that it creates
    application  --> the server object that `create_app` put into the routes

    JSON --ForeignAction--> an action of the foreign type, in `.foreign_action`
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

_OPENENV_PACKAGES = ("openenv", "openenv_core")
_BASE_TYPE_NAMES = ("Action", "Observation", "State")
_MCP_CLASS_NAME = "MCPEnvironment"
_MAX_CLOSURE_DEPTH = 4
_MAX_REPR_CHARS = 200
ActionParser = Callable[[JsonObject], Any]
"""Converts JSON to an instance, or raises ValueError, including pydantic's ValidationError."""
_OBJECT_SCHEMA: JsonObject = {"type": "object", "properties": {"metadata": {"type": "object"}}}


class _ForeignModel(BaseModel):
    foreign_schema: ClassVar[JsonObject]

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> JsonObject:
        """Return the foreign type's schema."""
        return cls.foreign_schema


class ForeignAction(_ForeignModel, Action):
    """An action whose fields are validated by the foreign type."""

    model_config = ConfigDict(extra="allow")

    parse_foreign: ClassVar[ActionParser]

    _foreign_action: Any = PrivateAttr(default=None)

    @property
    def foreign_action(self) -> Any:
        """The action for the foreign environment."""
        return self._foreign_action

    @model_validator(mode="wrap")
    @classmethod
    def _parse(cls, fields: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        action = validate(fields)
        if isinstance(fields, dict):
            action._foreign_action = cls.parse_foreign(fields)
        return action


class ForeignObservation(_ForeignModel, Observation):
    """An observation with the foreign type's fields, except reward and done."""

    model_config = ConfigDict(extra="allow")


class ForeignState(_ForeignModel, State):
    """A state with the foreign type's fields."""

    model_config = ConfigDict(extra="allow")


def _read_type(foreign_type: Any) -> tuple[ActionParser, JsonObject]:
    """Return the parser and schema of a foreign type. Without a type, they accept any object."""
    if is_pydantic_model(foreign_type):
        return foreign_type.model_validate, _read_schema(foreign_type.model_json_schema)
    if dataclasses.is_dataclass(foreign_type):
        try:
            type_adapter: TypeAdapter[Any] = TypeAdapter(foreign_type)
        except PydanticSchemaGenerationError:  # pydantic does not support the type of a field
            return lambda fields: _construct(foreign_type, fields), _OBJECT_SCHEMA
        return type_adapter.validate_python, _read_schema(type_adapter.json_schema)
    return lambda fields: fields, _OBJECT_SCHEMA


def is_pydantic_model(foreign_type: Any) -> bool:
    """Return True if a type is a class of pydantic models."""
    return isinstance(foreign_type, type) and issubclass(foreign_type, BaseModel)


def _remove_reward(schema: JsonObject) -> JsonObject:
    """Remove reward and done from a schema, because they are sent next to the observation."""
    properties = {"metadata": {"type": "object"}, **schema.get("properties", {})}
    moved_fields = ("reward", "done")
    return {
        **schema,
        "properties": {key: child for key, child in properties.items() if key not in moved_fields},
        "required": [name for name in schema.get("required", []) if name not in moved_fields],
    }


def read_fields(foreign_object: Any) -> JsonObject:
    """Return the fields of a foreign observation or state as JSON."""
    if isinstance(foreign_object, BaseModel):
        try:
            return foreign_object.model_dump(mode="json")
        except PydanticSerializationError:  # arrays in a field of type Any
            return read_fields(foreign_object.model_dump())
    if dataclasses.is_dataclass(foreign_object) and not isinstance(foreign_object, type):
        return {
            field.name: _to_json(getattr(foreign_object, field.name))
            for field in dataclasses.fields(foreign_object)
        }
    if isinstance(foreign_object, dict):
        return {str(name): _to_json(child) for name, child in foreign_object.items()}
    return {
        name: _to_json(child)
        for name, child in vars(foreign_object).items()
        if not name.startswith("_")
    }


def _to_json(value: Any) -> Any:
    """Convert a value to plain JSON. A value without a JSON form becomes a shortened `repr`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return _to_json(value.value)
    if isinstance(value, np.generic) or hasattr(value, "tolist"):  # arrays, tensors
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _to_json(child) for key, child in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_json(child) for child in value]
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return read_fields(value)
    return repr(value)[:_MAX_REPR_CHARS]


def _construct(foreign_type: Any, fields: JsonObject) -> Any:
    try:
        return foreign_type(**fields)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _read_schema(build_schema: Callable[[], JsonObject]) -> JsonObject:
    try:
        return build_schema()
    except ValueError:  # JSON schema cannot describe a field
        return _OBJECT_SCHEMA


@dataclass(frozen=True, slots=True)
class OpenEnvSource:
    """A class of foreign environments, with its types and a function that creates instances."""

    create: Callable[..., Any]
    env_class: type[Any]
    parse_action: ActionParser
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
        return tuple(name for name, parameter in parameters if parameter.kind in _NAMED_KINDS)[1:]

    @property
    def accepts_any_argument(self) -> bool:
        """True if `reset` accepts arguments with any name."""
        parameters = self._reset_parameters.values()
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def choose_method(self, name: str) -> str:
        """Return the name of `reset` or `step`, or of its async form if the class defines it."""
        is_async = _is_overridden(self.env_class, f"{name}_async")
        return f"{name}_async" if is_async else name

    @property
    def _reset_parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(getattr(self.env_class, self.choose_method("reset"))).parameters


_NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find_source(target: str, target_object: Any) -> OpenEnvSource:
    """Return the source for the object that an `openenv:` target names.

    Raises:
        ConfigError: the object is not an environment class, a factory or an application.
    """
    if hasattr(target_object, "routes"):
        return _read_app(target, target_object)
    if not callable(target_object):
        raise ConfigError(
            f"'{target}' must be an OpenEnv environment class, a function that creates an"
            f" environment, or the application of create_app; got {type(target_object).__name__}"
        )
    env_class = _find_class(target_object)
    action_type, observation_type, state_type = _find_types(env_class)
    if action_type is None:
        raise ConfigError(
            f"{env_class.__name__}.step needs an annotation of its action type, as in"
            f" step(self, action: MyAction); add it, or name the application instead:"
            f" openenv:{env_class.__module__.rpartition('.')[0] or env_class.__module__}.app:app"
        )
    return _make_source(target_object, env_class, action_type, observation_type, state_type)


def _read_app(target: str, app: Any) -> OpenEnvSource:
    endpoints = [getattr(route, "endpoint", None) for route in app.routes]
    server = next((server for endpoint in endpoints for server in _search_closure(endpoint)), None)
    if server is None:
        raise ConfigError(
            f"'{target}' must be an application of OpenEnv's create_app, but its routes use no"
            " environment; name the class: openenv:module:Class"
        )
    create = getattr(server, "_env_factory", None)
    if create is None:  # OpenEnv 0.1 stores an instance
        create = type(server.env)
        _require_no_arguments(target, create)
    env_class = _find_class(create)
    state_type = getattr(server, "state_cls", None)
    if state_type is None or state_type.__name__ in _BASE_TYPE_NAMES:
        state_type = _find_types(env_class)[2]
    return _make_source(create, env_class, server.action_cls, server.observation_cls, state_type)


def _make_source(
    create: Callable[..., Any],
    env_class: type[Any],
    action_type: Any,
    observation_type: Any,
    state_type: Any,
) -> OpenEnvSource:
    mcp_class = next((base for base in env_class.__mro__ if base.__name__ == _MCP_CLASS_NAME), None)
    mcp_names = vars(sys.modules[mcp_class.__module__]) if mcp_class is not None else {}
    parse_action, action_schema = _read_type(action_type)
    has_any_fields = (
        mcp_class is not None or getattr(observation_type, "__name__", "") in _BASE_TYPE_NAMES
    )
    return OpenEnvSource(
        create=create,
        env_class=env_class,
        parse_action=_make_tool_parser(action_type, mcp_names) or parse_action,
        action_schema=action_schema,
        observation_schema=(
            _OBJECT_SCHEMA if has_any_fields else _remove_reward(_read_type(observation_type)[1])
        ),
        state_schema=_read_type(state_type)[1],
        list_tools=mcp_names.get("ListToolsAction"),
        call_tool=mcp_names.get("CallToolAction"),
    )


def _make_tool_parser(action_type: Any, mcp_names: dict[str, Any]) -> ActionParser | None:
    """Return a parser that also accepts tool actions, or None if the type does not allow them."""
    list_type, call_type = mcp_names.get("ListToolsAction"), mcp_names.get("CallToolAction")
    tool_types = (mcp_names.get("Action"), list_type, call_type)
    if action_type not in tool_types or not is_pydantic_model(action_type):
        return None
    types_by_name = {"list_tools": list_type, "call_tool": call_type}

    def parse_tool_action(tool_action: Any) -> Any:
        action_class = types_by_name.get(tool_action.get("type")) or action_type
        return action_class.model_validate(tool_action)

    return parse_tool_action


def _find_class(create: Callable[..., Any]) -> type[Any]:
    if inspect.isclass(create):
        return create
    sample = create()
    try:
        return type(sample)
    finally:
        close = getattr(sample, "close", None)
        if close is not None:
            close()


def _find_types(env_class: type[Any]) -> tuple[Any, Any, Any]:
    """Return the types of action, observation and state. An undeclared type is None."""
    step_hints = _read_hints(env_class.step) if hasattr(env_class, "step") else {}
    state_property = inspect.getattr_static(env_class, "state", None)
    state_hints = _read_hints(state_property.fget) if isinstance(state_property, property) else {}
    type_arguments = _find_type_arguments(env_class)
    has_tools = any(base.__name__ == _MCP_CLASS_NAME for base in env_class.__mro__)
    annotations = (step_hints.get("action"), step_hints.get("return"), state_hints.get("return"))
    types = [
        _choose_type(annotation, type_arguments, index, has_tools)
        for index, annotation in enumerate(annotations)
    ]
    return types[0], types[1], types[2]


def _choose_type(annotation: Any, arguments: tuple[Any, ...], index: int, may_be_base: bool) -> Any:
    """Return the annotation, or the type argument if the annotation is only a base class."""
    type_argument = arguments[index] if index < len(arguments) else None
    for candidate in (annotation, type_argument):
        if isinstance(candidate, type) and candidate.__name__ not in _BASE_TYPE_NAMES:
            return candidate
    return annotation if may_be_base and isinstance(annotation, type) else None


def _read_hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # the annotations use names that only type checkers import
        return {}


def _find_type_arguments(env_class: type[Any]) -> tuple[Any, ...]:
    for base in env_class.__mro__:
        for generic_base in getattr(base, "__orig_bases__", ()):
            arguments = typing.get_args(generic_base)
            if arguments and not isinstance(arguments[0], typing.TypeVar):
                return arguments
    return ()


def _is_overridden(env_class: type[Any], name: str) -> bool:
    """Return True if a subclass of OpenEnv's base class defines the method."""
    return any(
        name in vars(base)
        for base in env_class.__mro__
        if not (
            base.__name__ == "Environment" and base.__module__.split(".")[0] in _OPENENV_PACKAGES
        )
    )


def _search_closure(function: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the server objects in the closure of a handler."""
    for cell in getattr(inspect.unwrap(function), "__closure__", None) or ():
        try:
            cell_value = cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
        has_environment = hasattr(cell_value, "_env_factory") or hasattr(cell_value, "env")
        if hasattr(cell_value, "action_cls") and has_environment:
            yield cell_value
        elif inspect.isfunction(cell_value) and depth < _MAX_CLOSURE_DEPTH:
            yield from _search_closure(cell_value, depth + 1)


def _require_no_arguments(target: str, env_class: type[Any]) -> None:
    try:
        inspect.signature(env_class).bind()
    except TypeError as error:
        raise ConfigError(
            f"'{target}' contains one {env_class.__name__}, and another cannot be created"
            f" without arguments ({error}); name a function that creates one, as in"
            " openenv:module:function"
        ) from None

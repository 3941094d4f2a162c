"""Where a foreign environment comes from, and what is known of it before one is made.

class        --> annotations of `step`, else type arguments of `Environment[...]`
factory      --> the same of what it makes
application  --> the server object that `create_app` left in its routes
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ludus.env.adapters.openenv.models import (
    ForeignModel,
    foreign_model,
    is_model,
    observation_schema,
)
from ludus.proto.errors import ConfigError

_ROOTS = ("openenv", "openenv_core")
_BASE_TYPES = ("Action", "Observation", "State")
_MCP_CLASS = "MCPEnvironment"
_MAX_CLOSURE_DEPTH = 4


@dataclass(frozen=True, slots=True)
class OpenEnvSource:
    """What makes foreign environments of one kind, and what they are."""

    make: Callable[..., Any]
    kind: type[Any]
    action: ForeignModel
    observation: ForeignModel
    state: ForeignModel
    list_tools: Callable[..., Any] | None
    """The action that lists tools; None where the environment has none."""
    call_tool: Callable[..., Any] | None

    @property
    def description(self) -> str:
        """The class's first line."""
        return (inspect.getdoc(self.kind) or self.kind.__name__).strip().split("\n")[0]

    @property
    def version(self) -> str:
        """The class's own, else of nothing in particular."""
        found = getattr(self.kind, "version", "")
        return found if isinstance(found, str) and found else "1.0.0"

    @property
    def is_concurrent(self) -> bool:
        """True when a process may hold several."""
        return bool(getattr(self.kind, "SUPPORTS_CONCURRENT_SESSIONS", False))

    @property
    def needs_single_thread(self) -> bool:
        """True when all of a process must run in one thread."""
        return bool(getattr(self.kind, "REQUIRES_SINGLE_THREAD_EXECUTOR", False))

    def method(self, name: str) -> str:
        """`reset` or `step`, or its async form where the class overrides that."""
        is_async = _is_overridden(self.kind, f"{name}_async")
        return f"{name}_async" if is_async else name

    def arguments(self, name: str) -> list[str]:
        """The names that the method takes."""
        parameters = inspect.signature(getattr(self.kind, self.method(name))).parameters
        return [name for name, one in parameters.items() if one.kind in _NAMED]

    def takes(self, name: str, argument: str) -> bool:
        """True when the method takes an argument of that name."""
        return argument in self.arguments(name)

    def takes_any(self, name: str) -> bool:
        """True when the method takes arguments of any name."""
        parameters = inspect.signature(getattr(self.kind, self.method(name))).parameters
        return any(one.kind is one.VAR_KEYWORD for one in parameters.values())


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def source_of(target: str, found: Any) -> OpenEnvSource:
    """What the object behind an `openenv:` target makes.

    Raises:
        ConfigError: it is no environment class, factory or application.
    """
    if hasattr(found, "routes"):
        return _of_app(target, found)
    if not callable(found):
        raise ConfigError(
            f"expected '{target}' to be an OpenEnv environment class, a function that makes one,"
            f" or the application of create_app; got {type(found).__name__}"
        )
    kind = _kind_of(found)
    action, observation, state = _types_of(kind)
    if action is None:
        raise ConfigError(
            f"expected {kind.__name__}.step to say its action type, as in"
            f" step(self, action: MyAction), got no annotation; name the application instead:"
            f" openenv:{kind.__module__.rpartition('.')[0] or kind.__module__}.app:app"
        )
    return _source(found, kind, action, observation, state)


def _of_app(target: str, app: Any) -> OpenEnvSource:
    server = next((one for one in _servers_in(app)), None)
    if server is None:
        raise ConfigError(
            f"expected '{target}' to be an application of OpenEnv's create_app, found no"
            " environment behind its routes; name the class: openenv:module:Class"
        )
    make = getattr(server, "_env_factory", None)
    if make is None:  # 0.1 holds an instance
        make = type(server.env)
        _require_no_arguments(target, make)
    kind = _kind_of(make)
    state = getattr(server, "state_cls", None)
    if state is None or state.__name__ in _BASE_TYPES:
        state = _types_of(kind)[2]
    return _source(make, kind, server.action_cls, server.observation_cls, state)


def _source(
    make: Callable[..., Any], kind: type[Any], action: Any, observation: Any, state: Any
) -> OpenEnvSource:
    mcp = next((base for base in kind.__mro__ if base.__name__ == _MCP_CLASS), None)
    names = vars(sys.modules[mcp.__module__]) if mcp is not None else {}
    observed = foreign_model(observation)
    may_vary = mcp is not None or getattr(observation, "__name__", "") in _BASE_TYPES
    schema = foreign_model(None).schema if may_vary else observation_schema(observed.schema)
    return OpenEnvSource(
        make=make,
        kind=kind,
        action=foreign_model(action, _tool_reader(action, names)),
        observation=ForeignModel(observed.read, schema),
        state=foreign_model(state),
        list_tools=names.get("ListToolsAction"),
        call_tool=names.get("CallToolAction"),
    )


def _tool_reader(action: Any, names: dict[str, Any]) -> Callable[[Any], Any] | None:
    """What reads actions that list or call tools too; None where the type allows none."""
    kinds = {"list_tools": names.get("ListToolsAction"), "call_tool": names.get("CallToolAction")}
    if action not in (names.get("Action"), *kinds.values()) or not is_model(action):
        return None

    def read(data: Any) -> Any:
        kind = kinds.get(data.get("type")) or action
        return kind.model_validate(data)

    return read


def _kind_of(make: Callable[..., Any]) -> type[Any]:
    if inspect.isclass(make):
        return make
    sample = make()
    try:
        return type(sample)
    finally:
        close = getattr(sample, "close", None)
        if close is not None:
            close()


def _types_of(kind: type[Any]) -> tuple[Any, Any, Any]:
    """Action, observation and state type; None where the class does not say."""
    hints = _hints_of(kind.step) if hasattr(kind, "step") else {}
    state = inspect.getattr_static(kind, "state", None)
    state_hints = _hints_of(state.fget) if isinstance(state, property) else {}
    arguments = _type_arguments(kind)
    is_mcp = any(base.__name__ == _MCP_CLASS for base in kind.__mro__)
    found = (hints.get("action"), hints.get("return"), state_hints.get("return"))
    action, observation, state_type = (
        _specific(hint, arguments, index, is_mcp) for index, hint in enumerate(found)
    )
    return action, observation, state_type


def _specific(hint: Any, arguments: tuple[Any, ...], index: int, may_be_base: bool) -> Any:
    """The annotation where it says more than the base class, else the type argument."""
    argument = arguments[index] if index < len(arguments) else None
    for one in (hint, argument):
        if isinstance(one, type) and one.__name__ not in _BASE_TYPES:
            return one
    return hint if may_be_base and isinstance(hint, type) else None


def _hints_of(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # names that only type checkers import
        return {}


def _type_arguments(kind: type[Any]) -> tuple[Any, ...]:
    for base in kind.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            arguments = typing.get_args(generic)
            if arguments and not isinstance(arguments[0], typing.TypeVar):
                return arguments
    return ()


def _is_overridden(kind: type[Any], name: str) -> bool:
    """True when a class below OpenEnv's base class defines the method."""
    return any(
        name in vars(base)
        for base in kind.__mro__
        if not (base.__name__ == "Environment" and base.__module__.split(".")[0] in _ROOTS)
    )


def _servers_in(app: Any) -> Iterator[Any]:
    """The server objects that the application's handlers hold."""
    for route in app.routes:
        endpoint = getattr(route, "endpoint", None)
        if endpoint is not None:
            yield from _held_by(endpoint, 0)


def _held_by(function: Any, depth: int) -> Iterator[Any]:
    for cell in getattr(inspect.unwrap(function), "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if hasattr(held, "action_cls") and (hasattr(held, "_env_factory") or hasattr(held, "env")):
            yield held
        elif inspect.isfunction(held) and depth < _MAX_CLOSURE_DEPTH:
            yield from _held_by(held, depth + 1)


def _require_no_arguments(target: str, kind: type[Any]) -> None:
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ConfigError(
            f"'{target}' holds one {kind.__name__}, and another cannot be made without arguments"
            f" ({error}); name a function that makes one: openenv:module:function"
        ) from None

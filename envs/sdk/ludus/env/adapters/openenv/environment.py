"""An environment that was written for OpenEnv, unchanged, as an `Environment`.

    openenv:module:Class  --+
    openenv:module:app    --+--OpenEnvSource--> a class made for it --()--> environment
    a factory function    --+                                                  |
                                                    its own thread: every call of the foreign
                                                    environment, async ones on its event loop

Works with OpenEnv 0.1 to 0.10, whose classes it never imports by itself: what an action is,
the environment's annotations or its application say. Each environment lives in one thread,
as on OpenEnv's servers, because libraries such as browsers and SQLite ask for that; all
environments that declare REQUIRES_SINGLE_THREAD_EXECUTOR share one.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any, ClassVar

from ludus.env.adapters.openenv.models import (
    ForeignAction,
    ForeignModel,
    ForeignObservation,
    ForeignState,
    fields_of,
)
from ludus.env.adapters.openenv.source import OpenEnvSource, source_of
from ludus.env.adapters.openenv.text import OpenEnvRenderer
from ludus.env.adapters.openenv.thread import EnvironmentThread
from ludus.env.encoding import read_success
from ludus.env.environment import Builder, Environment
from ludus.env.types import JsonObject, Tool, Transition
from ludus.proto.errors import CapacityError, EpisodeStateError, ErrorCode, ToolError

_RESET_ARGUMENTS = frozenset({"self", "seed"})
_LEAVE_TIMEOUT_S = 0.5
_TRUNCATED_KEYS = ("truncated", "TimeLimit.truncated")


class OpenEnvEnvironment(Environment[ForeignAction, ForeignObservation, ForeignState]):
    """One foreign environment; subclasses are made for each target."""

    source: ClassVar[OpenEnvSource]
    num_living: ClassVar[list[int]]
    """How many there are in this process, as the only element."""
    living: ClassVar[threading.Condition] = threading.Condition()
    shared_thread: ClassVar[EnvironmentThread | None] = None
    """Of environments that must all run in one."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._is_over = False
        self._is_open = False
        self._enter()
        self._thread = self.shared_thread or EnvironmentThread(self.name)
        try:
            self._foreign: Any = self._thread.run(lambda: self.source.make(**options))
        except BaseException:
            self._leave()
            raise
        if self.source.action.schema.get("properties"):
            self.text_renderer = OpenEnvRenderer(self.name, self.action_type)

    @property
    def options(self) -> JsonObject:
        """What the foreign class got."""
        return dict(self._options)

    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[ForeignObservation]:
        """The first observation; `seed` goes to the environment if it takes one."""
        self._is_over = False
        arguments = {"seed": seed, **options} if seed is not None else options
        if not self.source.takes_any("reset"):
            arguments = {k: v for k, v in arguments.items() if self.source.takes("reset", k)}
        transition = self._transition(self._call("reset", arguments))
        if transition.reward is None:
            return transition
        return Transition(
            transition.observation,
            None,
            transition.terminated,
            transition.truncated,
            info={**transition.info, "reset_reward": transition.reward},
        )

    def step(self, action: ForeignAction) -> Transition[ForeignObservation]:
        """What the action led to."""
        if self._is_over:
            raise EpisodeStateError(
                "expected no step after the episode's end; call reset to start the next one",
                ErrorCode.EPISODE_OVER,
            )
        return self._transition(self._call("step", {}, action.foreign))

    @property
    def state(self) -> ForeignState:
        """The foreign state, fields of its subclass included."""
        fields = self._thread.run(lambda: fields_of(self._foreign.state))
        state: Any = self.state_type.model_validate(fields)
        return state

    @property
    def tools(self) -> list[Tool]:
        """The tools of an MCPEnvironment."""
        if self.source.list_tools is None:
            return []
        listed = fields_of(self._call("step", {}, self.source.list_tools()))
        return [
            Tool(
                name=tool["name"],
                description=tool.get("description") or "",
                input_schema=tool.get("input_schema") or tool.get("inputSchema") or {},
            )
            for tool in listed.get("tools", [])
        ]

    def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """What a tool of an MCPEnvironment returned, as MCP has it."""
        if self.source.call_tool is None:
            return super().call_tool(name, arguments)
        action = self.source.call_tool(tool_name=name, arguments=arguments)
        returned = fields_of(self._call("step", {}, action))
        error = returned.get("error")
        if error:
            raise ToolError(f"tool '{name}' failed: {error.get('message') or error}")
        result = returned.get("result")
        if not isinstance(result, dict) or "content" not in result:
            return result if isinstance(result, dict) else {"result": result}
        if result.get("is_error"):
            raise ToolError(f"tool '{name}' failed: {result['content']}")
        structured = result.get("structured_content")
        return structured if isinstance(structured, dict) else {"result": result.get("data")}

    def close(self) -> None:
        """Close the foreign environment and end its thread."""
        close = getattr(self._foreign, "close", None)
        try:
            if close is not None:
                self._thread.run(close)
        finally:
            self._leave()

    def _call(self, name: str, arguments: JsonObject, *positional: Any) -> Any:
        """What the foreign method returned; its async form where the class has one."""
        method = getattr(self._foreign, self.source.method(name))
        return self._thread.run(lambda: method(*positional, **arguments))

    def _transition(self, observed: Any) -> Transition[ForeignObservation]:
        fields = fields_of(observed)
        reward = fields.pop("reward", None)
        is_done = bool(fields.pop("done", False))
        metadata: JsonObject = fields.get("metadata") or {}
        is_truncated = is_done and any(
            bool(metadata.get(key) or fields.get(key)) for key in _TRUNCATED_KEYS
        )
        self._is_over = is_done
        observation: Any = self.observation_type.model_validate(fields)
        return Transition(
            observation,
            None if reward is None else float(reward),
            terminated=is_done and not is_truncated,
            truncated=is_truncated,
            success=read_success(metadata, is_done=is_done),
        )

    def _enter(self) -> None:
        with self.living:
            # The one before may be closing right now.
            is_free = not self.one_per_process or self.living.wait_for(
                lambda: not self.num_living[0], _LEAVE_TIMEOUT_S
            )
            if not is_free:
                raise CapacityError(
                    f"{self.name} does not declare SUPPORTS_CONCURRENT_SESSIONS, so a process"
                    " holds one session of it at a time; serve it with --isolation process,"
                    " which gives each session a process of its own"
                )
            self.num_living[0] += 1
            self._is_open = True

    def _leave(self) -> None:
        with self.living:
            if not self._is_open:
                return
            self._is_open = False
            self.num_living[0] -= 1
            self.living.notify_all()
        if self._thread is not self.shared_thread:
            self._thread.stop()


def openenv_builder(target: str, found: Any) -> Builder:
    """What makes environments of a foreign class, factory or application.

    Raises:
        ConfigError: it is none of these, or its action type cannot be found.
    """
    return _class_of(target, source_of(target, found))


def _class_of(target: str, source: OpenEnvSource) -> type[OpenEnvEnvironment]:
    attributes: JsonObject = {
        "__doc__": source.description,
        "name": target,
        "description": source.description,
        "version": source.version,
        "source": source,
        "action_type": _typed(ForeignAction, source.action),
        "observation_type": _typed(ForeignObservation, source.observation),
        "state_type": _typed(ForeignState, source.state),
        "num_living": [0],
        "one_per_process": not source.is_concurrent,
        "shared_thread": EnvironmentThread(target) if source.needs_single_thread else None,
        "reset": _declared_reset(source),
    }
    return type("OpenEnvEnvironment", (OpenEnvEnvironment,), attributes)


def _typed(base: type[Any], foreign: ForeignModel) -> type[Any]:
    return type(base.__name__, (base,), {"model": foreign, "__module__": base.__module__})


def _declared_reset(source: OpenEnvSource) -> Any:
    """`reset` with the arguments that the foreign one takes, for servers to read."""

    @functools.wraps(OpenEnvEnvironment.reset)
    def reset(
        self: OpenEnvEnvironment, *, seed: int | None = None, **options: Any
    ) -> Transition[ForeignObservation]:
        return OpenEnvEnvironment.reset(self, seed=seed, **options)

    names = [name for name in source.arguments("reset") if name not in _RESET_ARGUMENTS]
    keyword, self_kind = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", self_kind)]
    parameters += [inspect.Parameter(name, keyword, default=None) for name in ["seed", *names]]
    if source.takes_any("reset"):
        parameters.append(inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD))
    reset.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return reset

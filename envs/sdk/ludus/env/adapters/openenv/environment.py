"""Adapter for unmodified environments of OpenEnv.

    openenv:module:Class  --+
    openenv:module:app    --+--OpenEnvSource--> a class for the target --()--> environment
    a factory function    --+                                                    |
                                              one thread per environment, with an event loop, for
                                              all calls to the foreign environment

The adapter supports OpenEnv 0.1 to 0.10 and does not import OpenEnv. It reads the type of actions
from the environment's annotations or its application. Each environment runs in one thread, as on
OpenEnv's servers, because libraries such as browsers and SQLite require that. All environments that
declare REQUIRES_SINGLE_THREAD_EXECUTOR share one thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import Parameter
from typing import Any, ClassVar, cast

from pydantic import ValidationError

from ludus.env.adapters.openenv.source import (
    ForeignAction,
    ForeignObservation,
    ForeignState,
    OpenEnvSource,
    find_source,
    read_fields,
)
from ludus.env.encoding import read_success
from ludus.env.environment import Builder, Environment
from ludus.env.incoming.faults import list_faults
from ludus.env.text import FieldsText
from ludus.env.types import (
    Action,
    JsonObject,
    Message,
    Observation,
    Tool,
    ToolResult,
    Transition,
)
from ludus.proto.errors import (
    ActionParseError,
    CapacityError,
    EpisodeStateError,
    ErrorCode,
    ToolError,
)

_CLOSE_TIMEOUT_S = 0.5
_LIMIT_KEYS = ("truncated", "TimeLimit.truncated")


class EnvironmentThread:
    """A thread that runs one call at a time while the callers wait."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start()

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a call, await its value if it is awaitable, and return the value."""
        if self._pid != os.getpid():  # a fork does not copy threads
            self._start()
        return self._executor.submit(self._run_in_thread, call).result()

    def stop(self) -> None:
        """Stop the thread after the running call, without waiting for it."""
        self._executor.submit(self._runner.close)
        self._executor.shutdown(wait=False)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._executor = ThreadPoolExecutor(1, f"openenv {self._name}")
        # All calls share one loop, because connections belong to a loop.
        self._runner = asyncio.Runner()

    def _run_in_thread(self, call: Callable[[], Any]) -> Any:
        call_result = call()
        if not inspect.isawaitable(call_result):
            return call_result

        async def await_result() -> Any:
            return await call_result

        return self._runner.run(await_result())


class OpenEnvRenderer:
    """A text renderer for one environment, based on the schema of `action_type`."""

    def __init__(self, name: str, action_type: type[Action]) -> None:
        self._action_type = action_type
        self._fields_renderer = FieldsText(name, action_type.model_json_schema())

    def render(self, observation: Observation, *, first: bool) -> list[Message]:
        """Return one message with one field per line, and with instructions after a reset."""
        content = self._fields_renderer.render(observation.model_dump(mode="json"), first=first)
        return [{"role": "user", "content": content}]

    def parse(self, text: str, observation: Observation) -> Action:
        """Parse a language model's text as an action."""
        action_json = self._fields_renderer.parse(text, observation.model_extra or {})
        try:
            return self._action_type.model_validate(action_json)
        except ValidationError as error:
            fault_message = list_faults(error, with_input=False)[0]["msg"]
            raise ActionParseError(
                f"expected an action as described, got {text[-200:]!r}: {fault_message}"
            ) from None

    def legal_answers(self, observation: Observation) -> list[str]:
        """Return the observation's `legal_actions` as text, or the values of an enum."""
        return self._fields_renderer.legal_answers(observation.model_extra or {})


class OpenEnvEnvironment(Environment[ForeignAction, ForeignObservation, ForeignState]):
    """A foreign environment, with a subclass for each target."""

    source: ClassVar[OpenEnvSource]
    instance_slot: ClassVar[threading.Semaphore | None] = None
    """Permit for the only instance in this process; None if several instances are allowed."""
    shared_thread: ClassVar[EnvironmentThread | None] = None
    """Thread of all instances, if they must share one thread."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._is_over = False
        self._acquire_slot()
        self._thread = self.shared_thread or EnvironmentThread(self.name)
        try:
            self._foreign_environment: Any = self._thread.run(lambda: self.source.create(**options))
        except BaseException:
            self._release_resources()
            raise
        if self.source.action_schema.get("properties"):
            self.text_renderer = OpenEnvRenderer(self.name, self.action_type)

    @property
    def options(self) -> JsonObject:
        """The constructor arguments of the foreign class."""
        return dict(self._options)

    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[ForeignObservation]:
        """Return the first observation; the seed is passed to environments that accept one."""
        self._is_over = False
        arguments = {"seed": seed, **options} if seed is not None else options
        if not self.source.accepts_any_argument:
            names = arguments.keys() & self.source.reset_arguments
            arguments = {name: arguments[name] for name in names}
        transition = self._make_transition(self._call_foreign("reset", arguments))
        if transition.reward is not None:
            transition.info["reset_reward"] = transition.reward
            transition.reward = transition.success = None
        return transition

    def step(self, action: ForeignAction) -> Transition[ForeignObservation]:
        """Take an action and return its result."""
        if self._is_over:
            raise EpisodeStateError(
                "the episode is over; call reset to start the next episode", ErrorCode.EPISODE_OVER
            )
        return self._make_transition(self._call_foreign("step", {}, action.foreign_action))

    @property
    def state(self) -> ForeignState:
        """The foreign state with all fields of its class."""
        fields = self._thread.run(lambda: read_fields(self._foreign_environment.state))
        return cast(ForeignState, self.state_type.model_validate(fields))

    @property
    def tools(self) -> list[Tool]:
        """The tools of an MCPEnvironment."""
        if self.source.list_tools is None:
            return []
        observation = read_fields(self._call_foreign("step", {}, self.source.list_tools()))
        return [
            Tool(
                name=tool["name"],
                description=tool.get("description") or "",
                input_schema=tool.get("input_schema") or tool.get("inputSchema") or {},
            )
            for tool in observation.get("tools", [])
        ]

    def call_tool(self, name: str, arguments: JsonObject) -> JsonObject | ToolResult:
        """Call a tool of an MCPEnvironment, and return its result with its reward and end."""
        if self.source.call_tool is None:
            return super().call_tool(name, arguments)
        action = self.source.call_tool(tool_name=name, arguments=arguments)
        transition = self._make_transition(self._call_foreign("step", {}, action))
        return ToolResult(
            _read_tool_content(name, transition.observation.model_dump(mode="json")),
            transition.reward,
            transition.terminated,
            transition.truncated,
            transition.success,
        )

    def close(self) -> None:
        """Close the foreign environment and stop its thread."""
        close = getattr(self._foreign_environment, "close", None)
        try:
            if close is not None:
                self._thread.run(close)
        finally:
            self._release_resources()

    def _call_foreign(self, method_name: str, arguments: JsonObject, *actions: Any) -> Any:
        """Call a foreign method, or its async form if the class has one."""
        method = getattr(self._foreign_environment, self.source.choose_method(method_name))
        return self._thread.run(lambda: method(*actions, **arguments))

    def _make_transition(self, foreign_observation: Any) -> Transition[ForeignObservation]:
        fields = read_fields(foreign_observation)
        reward = fields.pop("reward", None)
        is_done = bool(fields.pop("done", False))
        metadata: JsonObject = fields.get("metadata") or {}
        is_truncated = is_done and any(metadata.get(key) or fields.get(key) for key in _LIMIT_KEYS)
        self._is_over |= is_done
        observation: Any = self.observation_type.model_validate(fields)
        return Transition(
            observation,
            None if reward is None else float(reward),
            terminated=is_done and not is_truncated,
            truncated=is_truncated,
            success=read_success(metadata, is_done=is_done),
        )

    def _acquire_slot(self) -> None:
        slot = self.instance_slot
        # The previous instance may be closing at this moment.
        self._holds_slot = slot is not None and slot.acquire(timeout=_CLOSE_TIMEOUT_S)
        if slot is not None and not self._holds_slot:
            raise CapacityError(
                f"{self.name} does not declare SUPPORTS_CONCURRENT_SESSIONS, so a process can"
                " have only one session of it; serve it with --isolation process, which"
                " runs each session in a separate process"
            )

    def _release_resources(self) -> None:
        if self.instance_slot is not None and self._holds_slot:
            self._holds_slot = False
            self.instance_slot.release()
        if self._thread is not self.shared_thread:
            self._thread.stop()


def _read_tool_content(name: str, observation: JsonObject) -> JsonObject:
    """Return the result in the observation of a tool call.

    Raises:
        ToolError: the tool failed.
    """
    if error := observation.get("error"):
        raise ToolError(f"tool '{name}' failed: {error.get('message') or error}")
    result = observation.get("result")
    if not isinstance(result, dict) or "content" not in result:
        return result if isinstance(result, dict) else {"result": result}
    if result.get("is_error"):
        raise ToolError(f"tool '{name}' failed: {result['content']}")
    content = result.get("structured_content")
    return content if isinstance(content, dict) else {"result": result.get("data")}


def make_openenv_builder(target: str, target_object: Any) -> Builder:
    """Return a function that creates environments of a foreign class, factory or application.

    Raises:
        ConfigError: the object is none of these, or its action type cannot be determined.
    """
    return _make_class(target, find_source(target, target_object))


def _make_class(target: str, source: OpenEnvSource) -> type[OpenEnvEnvironment]:
    env_class = source.env_class
    description = (inspect.getdoc(env_class) or env_class.__name__).strip().split("\n")[0]
    version = getattr(env_class, "version", "")
    is_concurrent = getattr(env_class, "SUPPORTS_CONCURRENT_SESSIONS", False)
    needs_shared_thread = getattr(env_class, "REQUIRES_SINGLE_THREAD_EXECUTOR", False)
    attributes: JsonObject = {
        "__doc__": description,
        "name": target,
        "description": description,
        "version": version if isinstance(version, str) and version else "1.0.0",
        "source": source,
        "action_type": _make_subclass(
            ForeignAction, source.action_schema, parse_foreign=source.parse_action
        ),
        "observation_type": _make_subclass(ForeignObservation, source.observation_schema),
        "state_type": _make_subclass(ForeignState, source.state_schema),
        "one_per_process": not is_concurrent,
        "instance_slot": None if is_concurrent else threading.Semaphore(1),
        "shared_thread": EnvironmentThread(target) if needs_shared_thread else None,
        "reset": _make_reset(source),
    }
    return type("OpenEnvEnvironment", (OpenEnvEnvironment,), attributes)


def _make_subclass(base_class: type[Any], schema: JsonObject, **attributes: Any) -> type[Any]:
    attributes |= {"foreign_schema": schema, "__module__": base_class.__module__}
    return type(base_class.__name__, (base_class,), attributes)


def _make_reset(source: OpenEnvSource) -> Any:
    """Create a `reset` whose signature contains the arguments of the foreign `reset`."""

    @functools.wraps(OpenEnvEnvironment.reset)
    def reset(
        self: OpenEnvEnvironment, *, seed: int | None = None, **options: Any
    ) -> Transition[ForeignObservation]:
        return OpenEnvEnvironment.reset(self, seed=seed, **options)

    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    argument_names = dict.fromkeys(["seed", *source.reset_arguments])
    parameters += [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in argument_names]
    if source.accepts_any_argument:
        parameters.append(Parameter("options", Parameter.VAR_KEYWORD))
    reset.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return reset

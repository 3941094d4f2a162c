"""Conversion between the types of the SDK and the messages of env.proto."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from functools import cached_property
from typing import Any

import numpy as np
import orjson

from ludus.env.encoding import EncodedResult, EncodedText, ResetArgs, plain_json
from ludus.env.sessions.interface import OpenArgs, OpenResult
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult, TaskSet, TextView, Tool
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import (
    EnvError,
    ErrorCode,
    InvalidCallError,
    clear_tracebacks,
    error_from_wire,
)

CONNECTED_KEY = "ludus-connected"
"""Key in the initial metadata of a Connect stream that the server has accepted."""
ENVIRONMENT_KEY = "ludus-env"
"""Metadata key that selects an environment at a gateway."""
_JSON_FIELDS = ("action_schema", "observation_schema", "state_schema", "options", "tools")
"""Fields of a description that are JSON in the message, where their names end with `_json`."""
_RESULT_FIELDS = tuple(field.name for field in fields(StepResult))


def fill_result(message: pb.StepResult, session_id: str, result: EncodedResult) -> None:
    """Write a result into a message in place, which avoids a copy."""
    message.session_id = session_id
    message.step_index = result.step_index
    message.observation_json = result.observation_json
    if result.reward is not None:
        message.reward = result.reward
    if result.terminated:
        message.terminated = True
    if result.truncated:
        message.truncated = True
    if result.info_json:
        message.info_json = result.info_json
    if result.text is not None:
        text = message.text
        text.messages_json = result.text.messages_json
        text.legal_answers.extend(result.text.legal_answers)
    if result.tensors:
        fill_tensors(message.tensors, result.tensors)
    if result.metadata_json:
        message.metadata_json = result.metadata_json
    if result.success is not None:
        message.success = result.success


def read_encoded(message: pb.StepResult) -> EncodedResult:
    """Read a result without decoding its JSON, so that it can be forwarded."""
    text = message.text if message.HasField("text") else None
    return EncodedResult(
        step_index=message.step_index,
        observation_json=message.observation_json,
        metadata_json=message.metadata_json,
        info_json=message.info_json,
        reward=message.reward if message.HasField("reward") else None,
        terminated=message.terminated,
        truncated=message.truncated,
        tensors=read_tensors(message.tensors) if message.tensors else {},
        text=EncodedText(text.messages_json, list(text.legal_answers)) if text else None,
        success=message.success if message.HasField("success") else None,
    )


class LazyStepResult(StepResult):
    """A StepResult that is parsed on first access, and equal to an eager one with its values.

    A loop over hundreds of sessions reads rewards and flags, and a language model's player reads
    the text. Few callers read everything, and parsing everything costs the client as much as the
    call. It keeps bytes instead of the message, because a message would keep its whole batch in
    memory.
    """

    _observation_json: bytes
    _info_json: bytes
    _encoded_text: tuple[bytes, list[str]] | None

    @cached_property
    def observation(self) -> JsonObject:
        observation: JsonObject = orjson.loads(self._observation_json)
        return observation

    @cached_property
    def info(self) -> JsonObject:
        return orjson.loads(self._info_json) if self._info_json else {}

    @cached_property
    def text(self) -> TextView | None:
        if self._encoded_text is None:
            return None
        messages_json, legal_answers = self._encoded_text
        return TextView(orjson.loads(messages_json), legal_answers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepResult):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _RESULT_FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[StepResult], tuple[Any, ...]]:
        return StepResult, tuple(getattr(self, name) for name in _RESULT_FIELDS)


def read_result(message: pb.StepResult) -> StepResult:
    """Read a result for a client."""
    result = LazyStepResult.__new__(LazyStepResult)
    text = None
    if message.HasField("text"):
        text = (message.text.messages_json, list(message.text.legal_answers))
    result.__dict__.update(
        reward=message.reward if message.HasField("reward") else None,
        terminated=message.terminated,
        truncated=message.truncated,
        step_index=message.step_index,
        tensors=read_tensors(message.tensors) if message.tensors else {},
        success=message.success if message.HasField("success") else None,
        _observation_json=message.observation_json,
        _info_json=message.info_json,
        _encoded_text=text,
    )
    return result


def call_session_id(call: pb.Call) -> str:
    """Return the id of the session that a call uses; empty if it uses none."""
    kind = call.WhichOneof("call")
    if kind is None or kind == "open_group":
        return ""
    session_id: str = getattr(call, kind).session_id
    return session_id


def fill_open_args(message: pb.OpenRequest, args: OpenArgs) -> None:
    """Write the arguments of an open into a message in place."""
    message.SetInParent()
    if args.reset is not None:
        fill_reset_args(message.reset, args.reset)
    message.close_when_done = args.close_when_done
    message.session_id = args.session_id
    message.linger_s = args.linger_s
    message.without_text = not args.with_text


def read_open_args(message: pb.OpenRequest) -> OpenArgs:
    """Read the arguments of an open."""
    return OpenArgs(
        reset=read_reset_args(message.reset) if message.HasField("reset") else None,
        close_when_done=message.close_when_done,
        linger_s=message.linger_s,
        with_text=not message.without_text,
        session_id=message.session_id,
    )


def fill_opened(message: pb.OpenResponse, opened: OpenResult) -> None:
    """Write a new session into a message in place."""
    message.session_id = opened.session_id
    message.tools_session_id = opened.tools_session_id
    if opened.first is not None:
        fill_result(message.first, opened.session_id, opened.first)


def read_opened(message: pb.OpenResponse) -> OpenResult:
    """Read a new session."""
    first_result = read_encoded(message.first) if message.HasField("first") else None
    return OpenResult(message.session_id, first_result, message.tools_session_id)


def fill_reset_args(message: pb.ResetArgs, args: ResetArgs) -> None:
    """Write the arguments of a reset into a message in place."""
    message.SetInParent()
    if args.seed is not None:
        message.seed = args.seed
    message.episode_id = args.episode_id
    if args.options:
        message.options_json = plain_json(args.options, "reset options")


def fill_step(
    message: pb.StepRequest, session_id: str, action: bytes | str, step_index: int
) -> None:
    """Write a step into a message in place."""
    message.session_id = session_id
    message.step_index = step_index
    if isinstance(action, bytes):
        message.action_json = action
    else:
        message.action_text = action


def fill_call_tool(
    message: pb.CallToolRequest, session_id: str, name: str, arguments: JsonObject
) -> None:
    """Write a tool call into a message in place."""
    message.session_id = session_id
    message.name = name
    message.arguments_json = plain_json(arguments, "arguments")


def read_reset_args(message: pb.ResetArgs) -> ResetArgs:
    """Read the arguments of a reset."""
    options = read_object(message.options_json, "options_json")
    seed = message.seed if message.HasField("seed") else None
    return ResetArgs(seed, message.episode_id, options)


def read_object(text: bytes, field: str) -> JsonObject:
    """Read the JSON object in a field of a call; an empty field is an empty object."""
    if not text:
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidCallError(
            f"{field} must be a JSON object: {error}", ErrorCode.INVALID_JSON
        ) from error
    if not isinstance(value, dict):
        raise InvalidCallError(f"{field} must be a JSON object, got {value!r:.200}")
    plain_json(value, field)
    return value


def read_action(message: pb.StepRequest) -> bytes | str:
    """Read an action. Bytes are JSON; a str is text."""
    if message.tensors:
        raise InvalidCallError(
            f"an action must be JSON or text, got {len(message.tensors)} tensors; put the values"
            " into action_json"
        )
    kind = message.WhichOneof("action")
    if kind is None:
        raise InvalidCallError("expected action_json or action_text, got neither")
    return message.action_json if kind == "action_json" else message.action_text


def fill_error(message: pb.Error, error: EnvError, session_id: str) -> None:
    """Write an error into a message in place, and release the error's traceback."""
    clear_tracebacks(error)
    message.code = error.code
    message.message = error.message
    message.session_id = session_id
    message.retry_after_s = error.retry_after_s


def read_error(message: pb.Error) -> EnvError:
    """Return the exception for an error message."""
    return error_from_wire(message.code, message.message, message.retry_after_s)


def describe_message(description: EnvironmentDescription) -> pb.DescribeResponse:
    """Convert a description to a message."""
    content = asdict(description)
    for name in _JSON_FIELDS:
        content[f"{name}_json"] = orjson.dumps(content.pop(name))
    content["takes_any_option"] = description.reset_options is None
    content["reset_options"] = sorted(description.reset_options or ())
    return pb.DescribeResponse(**content)


def read_description(message: pb.DescribeResponse) -> EnvironmentDescription:
    """Read a description."""
    content = {
        field.name: getattr(message, field.name)
        for field in fields(EnvironmentDescription)
        if field.name not in _JSON_FIELDS
    }
    for name in _JSON_FIELDS:
        content[name] = orjson.loads(getattr(message, f"{name}_json") or b"{}")
    content["tools"] = [Tool(**tool) for tool in content["tools"]]
    content["reset_options"] = frozenset(message.reset_options)
    if message.takes_any_option:
        content["reset_options"] = None
    content["tasks"] = None
    if message.HasField("tasks"):
        tasks = message.tasks
        content["tasks"] = TaskSet(tasks.num_tasks, tasks.num_test_tasks, tuple(tasks.columns))
    return EnvironmentDescription(**content)


def fill_tensors(messages: Any, tensors: Mapping[str, np.ndarray]) -> None:
    """Append the arrays to a repeated Tensor field."""
    for name, array in tensors.items():
        little_endian = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        messages.add(
            name=name,
            dtype=array.dtype.name,
            shape=array.shape,
            data=little_endian.tobytes(),
        )


def read_tensors(messages: Iterable[pb.Tensor]) -> dict[str, np.ndarray]:
    """Return the arrays by name. They share the message's memory and are read-only."""
    return {tensor.name: _read_tensor(tensor) for tensor in messages}


def _read_tensor(tensor: pb.Tensor) -> np.ndarray:
    dtype = np.dtype(tensor.dtype).newbyteorder("<")
    return np.frombuffer(tensor.data, dtype=dtype).reshape(tuple(tensor.shape))

"""Conversion between the types of the SDK and the messages of env.proto."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson

from ludus.env.encoding import EncodedResult, EncodedText, ResetArgs, plain_json
from ludus.env.sessions.interface import OpenArgs, OpenResult
from ludus.env.types import EnvironmentDescription, JsonObject, TaskSet, Tool
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
    """Read the arguments of an open.

    Raises:
        InvalidCallError: the arguments are malformed.
    """
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


def read_reset_args(message: pb.ResetArgs) -> ResetArgs:
    """Read the arguments of a reset.

    Raises:
        InvalidCallError: `options_json` is not a JSON object, or it is nested too deeply.
    """
    options = read_object(message.options_json, "options_json")
    seed = message.seed if message.HasField("seed") else None
    return ResetArgs(seed, message.episode_id, options)


def read_object(text: bytes, field: str) -> JsonObject:
    """Read the JSON object in a field of a call; an empty field is an empty object.

    Raises:
        InvalidCallError: the value is not a JSON object, or it is nested too deeply.
    """
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
    """Read an action. Bytes are JSON; a str is text.

    Raises:
        InvalidCallError: the request has no action, or it has tensors.
    """
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
    return pb.DescribeResponse(
        name=description.name,
        description=description.description,
        version=description.version,
        action_schema_json=orjson.dumps(description.action_schema),
        observation_schema_json=orjson.dumps(description.observation_schema),
        state_schema_json=orjson.dumps(description.state_schema),
        has_text_view=description.has_text_view,
        max_sessions=description.max_sessions,
        options_json=orjson.dumps(description.options),
        reset_options=sorted(description.reset_options or ()),
        takes_any_option=description.reset_options is None,
        is_deterministic=description.is_deterministic,
        tools_json=orjson.dumps([asdict(tool) for tool in description.tools]),
        server_id=description.server_id,
        linger_s=description.linger_s,
        idle_timeout_s=description.idle_timeout_s,
        tasks=_task_set_message(description.tasks),
        takes_any_text=description.takes_any_text,
    )


def read_description(message: pb.DescribeResponse) -> EnvironmentDescription:
    """Read a description."""
    return EnvironmentDescription(
        name=message.name,
        description=message.description,
        version=message.version,
        action_schema=orjson.loads(message.action_schema_json),
        observation_schema=orjson.loads(message.observation_schema_json),
        state_schema=orjson.loads(message.state_schema_json),
        has_text_view=message.has_text_view,
        max_sessions=message.max_sessions,
        options=orjson.loads(message.options_json or b"{}"),
        reset_options=None if message.takes_any_option else frozenset(message.reset_options),
        is_deterministic=message.is_deterministic,
        tools=[Tool(**tool) for tool in orjson.loads(message.tools_json or b"[]")],
        server_id=message.server_id,
        linger_s=message.linger_s,
        idle_timeout_s=message.idle_timeout_s,
        tasks=_read_task_set(message.tasks) if message.HasField("tasks") else None,
        takes_any_text=message.takes_any_text,
    )


def _task_set_message(tasks: TaskSet | None) -> pb.TaskSet | None:
    return None if tasks is None else pb.TaskSet(**asdict(tasks))


def _read_task_set(message: pb.TaskSet) -> TaskSet:
    return TaskSet(message.num_tasks, message.num_test_tasks, tuple(message.columns))


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

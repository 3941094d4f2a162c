"""Conversion between the types of the SDK and the messages of env.proto."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cached_property
from typing import Any

import numpy as np
import orjson

from ludus.env.encoding import (
    EncodedResult,
    EncodedText,
    EncodedToolResult,
    ResetArgs,
    encode_json,
)
from ludus.env.incoming.faults import shorten_input
from ludus.env.incoming.json_values import check_num_values
from ludus.env.sessions.interface import OpenArgs, OpenResult
from ludus.env.text.unicode import parse_json
from ludus.env.types import (
    EnvironmentDescription,
    JsonObject,
    ReturnRange,
    StepResult,
    TaskSet,
    TextView,
    Tool,
    ToolResult,
)
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import (
    EnvError,
    ErrorCode,
    InvalidCallError,
    clear_tracebacks,
    make_wire_error,
)

CONNECTED_KEY = "ludus-connected"
"""Key in the initial metadata of every Connect stream that the server has accepted."""
ENVIRONMENT_KEY = "ludus-env"
"""Metadata key that selects an environment at a gateway."""
_JSON_FIELDS = ("action_schema", "observation_schema", "state_schema", "options", "tools")
"""Fields of a description that are JSON in the message. The message's names end with `_json`."""
# All ids have the same number of bits, and so all calls the same overhead.
_attempt_ids = itertools.count(1 << 52 | secrets.randbits(51))
_RESULT_FIELD_NAMES = tuple(field.name for field in fields(StepResult))


def fill_result(message: pb.StepResult, session_id: str, result: EncodedResult) -> None:
    """Write a result directly into a message, which avoids a copy."""
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


def read_encoded_result(message: pb.StepResult) -> EncodedResult:
    """Read a result for forwarding, without decoding its JSON."""
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
    """A StepResult whose JSON is parsed on first access. It equals one with the same values.

    Few callers read every field: a loop over hundreds of sessions reads rewards and flags, and a
    language model's player reads the text. Parsing every field costs the client as much as the
    call. The result keeps bytes instead of the message, because a message would keep its whole
    batch in memory.
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
        return all(getattr(self, name) == getattr(other, name) for name in _RESULT_FIELD_NAMES)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[StepResult], tuple[Any, ...]]:
        return StepResult, tuple(getattr(self, name) for name in _RESULT_FIELD_NAMES)


def read_result(message: pb.StepResult) -> StepResult:
    """Read a result for a client."""
    result = LazyStepResult.__new__(LazyStepResult)
    encoded_text = None
    if message.HasField("text"):
        encoded_text = (message.text.messages_json, list(message.text.legal_answers))
    result.__dict__.update(
        reward=message.reward if message.HasField("reward") else None,
        terminated=message.terminated,
        truncated=message.truncated,
        step_index=message.step_index,
        tensors=read_tensors(message.tensors) if message.tensors else {},
        success=message.success if message.HasField("success") else None,
        _observation_json=message.observation_json,
        _info_json=message.info_json,
        _encoded_text=encoded_text,
    )
    return result


def get_call_session_id(call: pb.Call) -> str:
    """Return the id of the session that a call uses; empty if it uses none."""
    call_field = call.WhichOneof("call")
    if call_field is None or call_field == "open_group":
        return ""
    session_id: str = getattr(call, call_field).session_id
    return session_id


def fill_open_args(message: pb.OpenRequest, args: OpenArgs) -> None:
    """Write the arguments of an open into a message."""
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


def fill_open_result(message: pb.OpenResponse, open_result: OpenResult) -> None:
    """Write a new session into a message."""
    message.session_id = open_result.session_id
    message.tools_session_id = open_result.tools_session_id
    if open_result.first_result is not None:
        fill_result(message.first, open_result.session_id, open_result.first_result)


def read_open_result(message: pb.OpenResponse) -> OpenResult:
    """Read a new session."""
    first_result = read_encoded_result(message.first) if message.HasField("first") else None
    return OpenResult(message.session_id, first_result, message.tools_session_id)


def fill_reset_args(message: pb.ResetArgs, args: ResetArgs) -> None:
    """Write the arguments of a reset into a message."""
    message.SetInParent()
    if args.seed is not None:
        message.seed = args.seed
    message.episode_id = args.episode_id
    if args.options:
        message.options_json = encode_json(args.options, "reset options")


def make_attempt_id() -> int:
    """Return a new id of an attempt, which no other client of the session is likely to choose."""
    return next(_attempt_ids)


def fill_step(
    step: pb.StepRequest,
    session_id: str,
    action: bytes | str,
    step_index: int,
    attempt_id: int = 0,
) -> None:
    """Write a step into a message."""
    step.session_id = session_id
    step.step_index = step_index
    step.attempt_id = attempt_id
    if isinstance(action, bytes):
        step.action_json = action
    else:
        step.action_text = action


def fill_call_tool(
    message: pb.CallToolRequest, session_id: str, name: str, arguments: JsonObject
) -> None:
    """Write a tool call into a message."""
    message.session_id = session_id
    message.name = name
    message.arguments_json = encode_json(arguments, "arguments")


def fill_tool_result(
    message: pb.CallToolResponse, session_id: str, result: EncodedToolResult
) -> None:
    """Write the result of a tool call into a message."""
    message.session_id = session_id
    message.result_json = result.content_json
    message.terminated, message.truncated = result.terminated, result.truncated
    if result.reward is not None:
        message.reward = result.reward
    if result.success is not None:
        message.success = result.success


def read_encoded_tool_result(message: pb.CallToolResponse) -> EncodedToolResult:
    """Read the result of a tool call for forwarding, without decoding its JSON."""
    return EncodedToolResult(
        message.result_json,
        message.reward if message.HasField("reward") else None,
        message.terminated,
        message.truncated,
        message.success if message.HasField("success") else None,
    )


def read_tool_result(message: pb.CallToolResponse) -> ToolResult:
    """Read the result of a tool call for a client."""
    result = read_encoded_tool_result(message)
    content = orjson.loads(result.content_json)
    return ToolResult(content, result.reward, result.terminated, result.truncated, result.success)


def read_reset_args(message: pb.ResetArgs) -> ResetArgs:
    """Read the arguments of a reset."""
    options = read_json_object(message.options_json, "options_json")
    seed = message.seed if message.HasField("seed") else None
    return ResetArgs(seed, message.episode_id, options)


def read_json_object(encoded_json: bytes, field_name: str) -> JsonObject:
    """Read the JSON object in a field of a call. An empty field is an empty object."""
    if not encoded_json:
        return {}
    try:
        json_object = parse_json(encoded_json)
    except orjson.JSONDecodeError as error:
        raise InvalidCallError(
            f"{field_name} must be a JSON object: {error}", ErrorCode.INVALID_JSON
        ) from error
    if not isinstance(json_object, dict):
        raise InvalidCallError(
            f"{field_name} must be a JSON object, got {shorten_input(json_object)}"
        )
    encode_json(json_object, field_name)
    return json_object


def read_action(message: pb.StepRequest) -> bytes | str:
    """Read an action. Bytes are JSON; a str is text."""
    if message.tensors:
        raise InvalidCallError(
            f"an action must be JSON or text, got {len(message.tensors)} tensors; put the values"
            " into action_json"
        )
    action_field = message.WhichOneof("action")
    if action_field is None:
        raise InvalidCallError("expected action_json or action_text, got neither")
    if action_field == "action_text":
        return message.action_text
    check_num_values(message.action_json)
    return message.action_json


def fill_error(message: pb.Error, error: EnvError, session_id: str) -> None:
    """Write an error into a message, and release the error's traceback."""
    clear_tracebacks(error)
    message.code = error.code
    message.message = error.message
    message.session_id = session_id
    message.retry_after_s = error.retry_after_s


def read_error(message: pb.Error) -> EnvError:
    """Return the exception for an error message."""
    return make_wire_error(message.code, message.message, message.retry_after_s)


def make_description_message(description: EnvironmentDescription) -> pb.DescribeResponse:
    """Convert a description to a message."""
    field_values = asdict(description)
    for name in _JSON_FIELDS:
        field_values[f"{name}_json"] = orjson.dumps(field_values.pop(name))
    field_values["takes_any_option"] = description.reset_options is None
    field_values["reset_options"] = sorted(description.reset_options or ())
    return pb.DescribeResponse(**field_values)


def read_description(message: pb.DescribeResponse) -> EnvironmentDescription:
    """Read a description."""
    field_values = {
        field.name: getattr(message, field.name)
        for field in fields(EnvironmentDescription)
        if field.name not in _JSON_FIELDS
    }
    for name in _JSON_FIELDS:
        field_values[name] = orjson.loads(getattr(message, f"{name}_json") or b"{}")
    field_values["tools"] = [Tool(**tool) for tool in field_values["tools"]]
    field_values["reset_options"] = frozenset(message.reset_options)
    if message.takes_any_option:
        field_values["reset_options"] = None
    field_values["tasks"] = None
    if message.HasField("tasks"):
        tasks = message.tasks
        field_values["tasks"] = TaskSet(tasks.num_tasks, tasks.num_test_tasks, tuple(tasks.columns))
    field_values["return_range"] = None
    if message.HasField("return_range"):
        # An invalid range of a third-party server counts as not declared.
        with suppress(ValueError):
            bounds = message.return_range
            field_values["return_range"] = ReturnRange(bounds.lowest, bounds.highest)
    return EnvironmentDescription(**field_values)


def fill_tensors(messages: Any, tensors: Mapping[str, np.ndarray]) -> None:
    """Append the arrays to a repeated Tensor field."""
    for name, array in tensors.items():
        encoded_array = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        messages.add(name=name, dtype=array.dtype.name, shape=array.shape, data=encoded_array)


def read_tensors(messages: Iterable[pb.Tensor]) -> dict[str, np.ndarray]:
    """Return the arrays by name. They share the message's memory and are read-only."""
    return {tensor.name: _read_tensor(tensor) for tensor in messages}


def _read_tensor(tensor: pb.Tensor) -> np.ndarray:
    dtype = np.dtype(tensor.dtype).newbyteorder("<")
    return np.frombuffer(tensor.data, dtype=dtype).reshape(tuple(tensor.shape))

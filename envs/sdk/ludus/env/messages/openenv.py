"""OpenEnv's JSON messages, as its upstream clients of 0.2 to 0.10 send and expect them.

Our own clients ask for extras (`/ws?ludus=1`). They stand beside `observation`, never
inside it: typed upstream clients refuse unknown keys there.
"""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.env.encoding import SUCCESS_KEY, EncodedResult, ResetArgs, plain_json
from ludus.env.sessions.interface import Sessions
from ludus.env.types import EnvironmentDescription, JsonObject, TaskSet
from ludus.proto.errors import EnvError, ErrorCode, clear_tracebacks, error_message

MAX_FAULTS_BYTES = 65_536
"""Beyond this a refusal leaves out the input that it refuses."""


class ResetRequest(BaseModel):
    """The arguments of a reset; further keys go to the environment if it takes them."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)


class StepRequest(BaseModel):
    """The body of `POST /step`; without `action`, the other keys are the action (0.1)."""

    model_config = ConfigDict(extra="allow")

    action: JsonObject = Field(default_factory=dict)
    timeout_s: float | None = Field(default=None, gt=0)
    request_id: str | None = Field(default=None, max_length=255)

    @property
    def given_action(self) -> JsonObject:
        """The action, in either form."""
        if "action" in self.model_fields_set:
            return self.action
        return self.model_extra or {}


class _Envelope(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResetMessage(_Envelope):
    """Starts an episode."""

    type: Literal["reset"]
    data: JsonObject = Field(default_factory=dict)


class StepMessage(_Envelope):
    """Takes an action; `data` is the action itself."""

    type: Literal["step"]
    data: JsonObject


class LudusStepMessage(_Envelope):
    """A numbered step whose action is JSON or a language model's text."""

    type: Literal["step"]
    data: JsonObject | None = None
    text: str | None = None
    step_index: int = Field(default=0, ge=0)


class StateMessage(_Envelope):
    """Asks for the state."""

    type: Literal["state"]


class CloseMessage(_Envelope):
    """Ends the session."""

    type: Literal["close"]


class McpMessage(_Envelope):
    """A JSON-RPC call."""

    type: Literal["mcp"]
    data: JsonObject


def reset_args(
    data: JsonObject, description: EnvironmentDescription, *, lenient: bool
) -> ResetArgs:
    """The arguments of a reset.

    Args:
        lenient: drops what the environment does not take, as upstream servers do.

    Raises:
        ValidationError: seed or episode_id is malformed.
    """
    request = ResetRequest.model_validate(data)
    options = request.model_extra or {}
    if options:
        plain_json(options, "reset options")
    if lenient:
        options = {k: v for k, v in options.items() if description.takes_option(k)}
    return ResetArgs(request.seed, request.episode_id or "", options)


def action_json(action: JsonObject) -> bytes:
    """The action as it travels on.

    Raises:
        InvalidCallError: it is nested deeper than any action is.
    """
    return plain_json(action, "an action")


def observation_frame(result: EncodedResult) -> bytes:
    """The WebSocket frame for upstream clients, put together without a dictionary: the hot path."""
    reward = result.reward
    tail = b',"done":true' if result.terminated or result.truncated else b',"done":false'
    if metadata_json := _metadata_of(result):
        tail += b',"metadata":' + metadata_json
    return b"".join(
        (
            b'{"type":"observation","data":{"observation":',
            _whole_observation(result),
            b',"reward":',
            b"null" if reward is None else orjson.dumps(reward),
            tail,
            b"}}",
        )
    )


def observation_payload(result: EncodedResult) -> JsonObject:
    """What upstream clients get for a reset or step; holds JSON fragments."""
    return _payload(result, _whole_observation(result))


def ludus_payload(result: EncodedResult) -> JsonObject:
    """The upstream payload and beside it all that OpenEnv has no key for."""
    payload = _payload(result, result.observation_json)
    payload["terminated"] = result.terminated
    payload["truncated"] = result.truncated
    payload["step_index"] = result.step_index
    if result.success is not None:
        payload["success"] = result.success
    if result.info_json:
        payload["info"] = orjson.Fragment(result.info_json)
    if result.text is not None:
        payload["text"] = {
            "messages": orjson.Fragment(result.text.messages_json),
            "legal_answers": result.text.legal_answers,
        }
    if result.tensors:
        payload["tensors"] = [_tensor_json(name, a) for name, a in result.tensors.items()]
    return payload


def upstream_metadata(data: JsonObject) -> JsonObject:
    """The metadata in an upstream server's payload, wherever it put it."""
    observation = data.get("observation")
    inner = observation.get("metadata") if isinstance(observation, dict) else None
    found = data.get("metadata") or inner
    return found if isinstance(found, dict) else {}


def _payload(result: EncodedResult, observation_json: bytes) -> JsonObject:
    payload: JsonObject = {
        "observation": orjson.Fragment(observation_json),
        "reward": result.reward,
        "done": result.terminated or result.truncated,
    }
    if metadata_json := _metadata_of(result):
        payload["metadata"] = orjson.Fragment(metadata_json)
    return payload


def _whole_observation(result: EncodedResult) -> bytes:
    """The observation; arrays that travel beside it elsewhere are in it, in place of a null."""
    if not result.tensors:
        return result.observation_json
    observation = orjson.loads(result.observation_json)
    for path, array in result.tensors.items():
        *parents, last = path.split(".")
        place: Any = observation
        for name in parents:
            place = _part(place, name)
        if isinstance(place, dict) and last in place and place[last] is None:
            place[last] = _array_json(array)
        elif isinstance(place, list) and last.isdecimal() and _part(place, last) is None:
            place[int(last)] = _array_json(array)
    return orjson.dumps(observation)


def _part(place: Any, name: str) -> Any:
    if isinstance(place, dict):
        return place.get(name)
    is_index = isinstance(place, list) and name.isdecimal() and int(name) < len(place)
    return place[int(name)] if is_index else ()


def read_tensors_json(tensors: list[JsonObject]) -> dict[str, np.ndarray]:
    """The arrays that a payload's `tensors` hold."""
    return {
        tensor["name"]: np.frombuffer(
            base64.b64decode(tensor["data"]), np.dtype(tensor["dtype"]).newbyteorder("<")
        ).reshape(tensor["shape"])
        for tensor in tensors
    }


def ludus_metadata(description: EnvironmentDescription) -> JsonObject:
    """What /metadata says beside OpenEnv's own keys; its presence advertises the extras."""
    reset_options = description.reset_options
    return {
        "has_text_view": description.has_text_view,
        "max_sessions": description.max_sessions,
        "options": description.options,
        "reset_options": None if reset_options is None else sorted(reset_options),
        "is_deterministic": description.is_deterministic,
        "tools": [asdict(tool) for tool in description.tools],
        "server_id": description.server_id,
        "idle_timeout_s": description.idle_timeout_s,
        "tasks": None if description.tasks is None else asdict(description.tasks),
        "takes_any_text": description.takes_any_text,
    }


def read_tasks(metadata: JsonObject) -> TaskSet | None:
    """The tasks that the extras of /metadata tell of; None where they tell of none."""
    tasks = metadata.get("tasks")
    if tasks is None:
        return None
    return TaskSet(tasks["num_tasks"], tasks["num_test_tasks"], tuple(tasks["columns"]))


def frame(kind: str, data: Any) -> bytes:
    """A server's WebSocket frame."""
    return orjson.dumps({"type": kind, "data": data})


def error_data(error: EnvError, sessions: Sessions, *, upstream: bool) -> JsonObject:
    """The `data` of an error frame; upstream clients get OpenEnv's own words.

    The error, which is told by that, lets go of its traceback.
    """
    clear_tracebacks(error)
    data: JsonObject = {"message": error.message, "code": str(error.code)}
    if error.retry_after_s > 0 and not upstream:
        data["retry_after_s"] = error.retry_after_s
    cause = error.__cause__
    if error.code is ErrorCode.CAPACITY_REACHED:
        load = sessions.load
        data |= {"active_sessions": load.num_sessions, "max_sessions": load.max_sessions}
    elif error.code is ErrorCode.FACTORY_ERROR:
        data["factory_name"] = name = sessions.description.name
        if upstream:
            data["message"] = f"Environment factory '{name}' failed to create instance."
    elif isinstance(cause, ValidationError):
        data |= validation_error_data(cause) if upstream else {"errors": faults(cause)}
    elif error.code is ErrorCode.EXECUTION_ERROR and upstream and cause is not None:
        data["message"] = error_message(cause)
    return data


def validation_error_data(error: ValidationError) -> JsonObject:
    """The `data` of the error frame for a message that does not fit its schema."""
    return {
        "message": "Invalid message",
        "code": str(ErrorCode.VALIDATION_ERROR),
        "errors": faults(error),
    }


def faults(error: ValidationError) -> list[JsonObject]:
    """Pydantic's faults as plain JSON values; large input is not sent back."""
    try:
        shown = error.json()
    except ValueError:  # the input is nested too deep to be shown
        shown = ""
    if not shown or len(shown) > MAX_FAULTS_BYTES:
        shown = orjson.dumps(error.errors(include_input=False, include_context=False)[:20]).decode()
    return orjson.loads(shown)


def _metadata_of(result: EncodedResult) -> bytes:
    """The metadata as JSON, with the success where there is one; empty when there is neither."""
    if result.success is None:
        return result.metadata_json
    metadata = orjson.loads(result.metadata_json) if result.metadata_json else {}
    return orjson.dumps({**metadata, SUCCESS_KEY: result.success})


def _tensor_json(name: str, array: np.ndarray) -> JsonObject:
    return {"name": name, **_array_json(array)}


def _array_json(array: np.ndarray) -> JsonObject:
    little_endian = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return {
        "dtype": array.dtype.name,
        "shape": array.shape,
        "data": base64.b64encode(little_endian.tobytes()).decode(),
    }

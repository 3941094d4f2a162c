"""OpenEnv's JSON messages, for the upstream clients of versions 0.2 to 0.10.

Clients of Ludus request extensions (`/ws?ludus=1`). The extensions are keys next to `observation`
and never inside it, because typed upstream clients reject unknown keys there.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ludus.env.encoding import SUCCESS_KEY, EncodedResult, ResetArgs, encode_json
from ludus.env.incoming.faults import MAX_REPEATED_BYTES, list_faults, shorten
from ludus.env.sessions.interface import Sessions
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import EnvError, ErrorCode, clear_tracebacks, read_error_message

_MAX_SUMMARIES = 20
_METADATA_FIELDS = ("name", "description", "version")
_SCHEMA_NAMES = ("action", "observation", "state")
_DESCRIPTION_ADAPTER = TypeAdapter(EnvironmentDescription)


class ResetRequest(BaseModel):
    """The arguments of a reset. Other keys are options of the environment."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)


class StepRequest(BaseModel):
    """The body of `POST /step`. In OpenEnv 0.1, the body has no key `action` and is the action."""

    model_config = ConfigDict(extra="allow")

    action: JsonObject = Field(default_factory=dict)
    timeout_s: float | None = Field(default=None, gt=0)
    request_id: str | None = Field(default=None, max_length=255)

    @property
    def parsed_action(self) -> JsonObject:
        """The action, as the value of `action` or as the body."""
        if "action" in self.model_fields_set:
            return self.action
        return self.model_extra or {}


class _StrictMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResetMessage(_StrictMessage):
    """A request to start an episode."""

    type: Literal["reset"]
    data: JsonObject = Field(default_factory=dict)


class StepMessage(_StrictMessage):
    """A request to take the action in `data`."""

    type: Literal["step"]
    data: JsonObject


class LudusStepMessage(_StrictMessage):
    """A numbered step whose action is JSON or a language model's text."""

    type: Literal["step"]
    data: JsonObject | None = None
    text: str | None = None
    step_index: int = Field(default=0, ge=0)
    attempt_id: int = Field(default=0, ge=0)
    """Id of this attempt, see `Sessions.step`; 0 if the client sends none."""


class PlainMessage(_StrictMessage):
    """A request for the state, or to close the session."""

    type: Literal["state", "close"]


class McpMessage(_StrictMessage):
    """A JSON-RPC call."""

    type: Literal["mcp"]
    data: JsonObject


def parse_reset_args(
    request_json: JsonObject, description: EnvironmentDescription, *, ignores_unknown: bool
) -> ResetArgs:
    """Read the arguments of a reset.

    Args:
        ignores_unknown: ignore options that the environment does not accept. Upstream
            servers do so.

    Raises:
        ValidationError: seed or episode_id is malformed.
    """
    request = ResetRequest.model_validate(request_json)
    options = request.model_extra or {}
    if options:
        encode_json(options, "reset options")
    if ignores_unknown:
        options = {name: value for name, value in options.items() if description.takes_option(name)}
    return ResetArgs(request.seed, request.episode_id or "", options)


def make_upstream_payload(result: EncodedResult) -> JsonObject:
    """Return the payload of a reset or step for upstream clients; it contains JSON fragments."""
    return _make_payload(result, _insert_tensors(result))


def make_ludus_payload(result: EncodedResult) -> JsonObject:
    """Return the payload of a reset or step with the extensions of Ludus."""
    payload = _make_payload(result, result.observation_json)
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
        payload["tensors"] = [
            {"name": name, **_encode_array(array)} for name, array in result.tensors.items()
        ]
    return payload


def read_upstream_metadata(payload: JsonObject) -> JsonObject:
    """Return the metadata of an upstream server's payload, which may be in its observation."""
    observation = payload.get("observation")
    observation_metadata = observation.get("metadata") if isinstance(observation, dict) else None
    metadata = payload.get("metadata") or observation_metadata
    return metadata if isinstance(metadata, dict) else {}


def _make_payload(result: EncodedResult, observation_json: bytes) -> JsonObject:
    payload: JsonObject = {
        "observation": orjson.Fragment(observation_json),
        "reward": result.reward,
        "done": result.terminated or result.truncated,
    }
    if metadata_json := _encode_metadata(result):
        payload["metadata"] = orjson.Fragment(metadata_json)
    return payload


def _insert_tensors(result: EncodedResult) -> bytes:
    """Return the observation as JSON, in which the separate arrays replace their nulls."""
    if not result.tensors:
        return result.observation_json
    observation = orjson.loads(result.observation_json)
    for path, array in result.tensors.items():
        *parent_keys, key = path.split(".")
        parent: Any = observation
        for parent_key in parent_keys:
            parent = _get_child(parent, parent_key)
        if isinstance(parent, dict) and key in parent and parent[key] is None:
            parent[key] = _encode_array(array)
        elif isinstance(parent, list) and key.isdecimal() and _get_child(parent, key) is None:
            parent[int(key)] = _encode_array(array)
    return orjson.dumps(observation)


def _get_child(parent: Any, key: str) -> Any:
    if isinstance(parent, dict):
        return parent.get(key)
    is_index = isinstance(parent, list) and key.isdecimal() and int(key) < len(parent)
    return parent[int(key)] if is_index else ()


def read_tensors_json(tensors: list[JsonObject]) -> dict[str, np.ndarray]:
    """Return the arrays in a payload's `tensors` by name."""
    return {
        tensor["name"]: np.frombuffer(
            base64.b64decode(tensor["data"]), np.dtype(tensor["dtype"]).newbyteorder("<")
        ).reshape(tensor["shape"])
        for tensor in tensors
    }


def make_ludus_metadata(description: EnvironmentDescription) -> JsonObject:
    """Return the value of `ludus` in /metadata, which shows that the server has the extensions."""
    fields = asdict(description)
    for name in (*_METADATA_FIELDS, *(f"{name}_schema" for name in _SCHEMA_NAMES), "linger_s"):
        del fields[name]
    if description.reset_options is not None:
        fields["reset_options"] = sorted(description.reset_options)
    return fields


def read_metadata(metadata: JsonObject, schema: JsonObject) -> EnvironmentDescription:
    """Return the description from any server's responses to /metadata and /schema.

    Raises:
        ValueError: a field has a wrong type.
    """
    extensions = metadata.get("ludus") or {}
    if not isinstance(extensions, dict):
        raise ValueError(f"'ludus' must be an object, got {extensions!r:.60}")
    fields = {"has_text_view": False, "max_sessions": 0, **extensions}
    fields |= {name: metadata.get(name) or "" for name in _METADATA_FIELDS}
    fields |= {f"{name}_schema": schema.get(name) or {} for name in _SCHEMA_NAMES}
    try:
        return _DESCRIPTION_ADAPTER.validate_python(fields)
    except ValidationError as error:
        [fault, *_] = error.errors(include_url=False, include_input=False)
        name = ".".join(map(str, fault["loc"]))
        raise ValueError(f"'{name:.60}': {fault['msg']:.200}") from error


def encode_frame(frame_type: str, data: Any) -> bytes:
    """Return a server's WebSocket frame."""
    return orjson.dumps({"type": frame_type, "data": data})


def make_error_data(error: EnvError, sessions: Sessions, *, is_upstream: bool) -> JsonObject:
    """Return the `data` of an error frame, and release the error's traceback.

    Upstream clients get OpenEnv's messages.
    """
    clear_tracebacks(error)
    error_json: JsonObject = {"message": error.message, "code": str(error.code)}
    if error.retry_after_s > 0 and not is_upstream:
        error_json["retry_after_s"] = error.retry_after_s
    cause = error.__cause__
    if error.code is ErrorCode.CAPACITY_REACHED:
        load = sessions.load
        error_json |= {"active_sessions": load.num_sessions, "max_sessions": load.max_sessions}
    elif error.code is ErrorCode.FACTORY_ERROR:
        error_json["factory_name"] = name = sessions.description.name
        if is_upstream:
            error_json["message"] = f"Environment factory '{name}' failed to create instance."
    elif isinstance(cause, ValidationError):
        fault_data = make_validation_error_data(cause)
        error_json |= fault_data if is_upstream else {"errors": fault_data["errors"]}
    elif error.code is ErrorCode.EXECUTION_ERROR and is_upstream and cause is not None:
        error_json["message"] = read_error_message(cause)
    return error_json


def make_validation_error_data(error: ValidationError) -> JsonObject:
    """Return the `data` of the error frame for a message that violates its schema."""
    return {
        "message": "Invalid message",
        "code": str(ErrorCode.VALIDATION_ERROR),
        "errors": encode_faults(list_faults(error, with_documentation=True)),
    }


def encode_faults(faults: Sequence[Mapping[str, Any]]) -> orjson.Fragment:
    """Return pydantic's list of faults as JSON, without the input if it is large."""
    encoded_faults, num_bytes = [], 0
    for fault in faults:  # one after another, because each fault may repeat the whole input
        encoded_fault = _encode_fault(fault)
        num_bytes += len(encoded_fault)
        if not encoded_fault or num_bytes > MAX_REPEATED_BYTES:
            summaries = [
                {"type": fault["type"], "loc": _shorten_path(fault["loc"]), "msg": fault["msg"]}
                for fault in faults[:_MAX_SUMMARIES]
            ]
            return orjson.Fragment(orjson.dumps(summaries, default=str))
        encoded_faults.append(encoded_fault)
    return orjson.Fragment(b"[" + b",".join(encoded_faults) + b"]")


def _encode_fault(fault: Mapping[str, Any]) -> bytes:
    """Return a fault as JSON; empty if its input is nested too deeply."""
    try:
        return orjson.dumps(fault, default=str)
    except TypeError:
        return b""


def _shorten_path(path: Sequence[Any]) -> list[Any]:
    return [shorten(key) if isinstance(key, str) else key for key in path]


def _encode_metadata(result: EncodedResult) -> bytes:
    """Return the metadata and the success as JSON; empty if there is neither."""
    if result.success is None:
        return result.metadata_json
    metadata = orjson.loads(result.metadata_json) if result.metadata_json else {}
    return orjson.dumps({**metadata, SUCCESS_KEY: result.success})


def _encode_array(array: np.ndarray) -> JsonObject:
    little_endian_array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return {
        "dtype": array.dtype.name,
        "shape": array.shape,
        "data": base64.b64encode(little_endian_array.tobytes()).decode(),
    }

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

from ludus.env.encoding import SUCCESS_KEY, EncodedResult, ResetArgs, plain_json
from ludus.env.sessions.interface import Sessions
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.errors import EnvError, ErrorCode, clear_tracebacks, error_message

MAX_FAULTS_BYTES = 65_536
"""Size of validation errors above which the rejected input is left out."""
_METADATA_FIELDS = ("name", "description", "version")
_SCHEMAS = ("action", "observation", "state")
_DESCRIPTIONS = TypeAdapter(EnvironmentDescription)


class ResetRequest(BaseModel):
    """The arguments of a reset. Other keys are options of the environment."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)


class StepRequest(BaseModel):
    """The body of `POST /step`. Without `action`, the other keys are the action (OpenEnv 0.1)."""

    model_config = ConfigDict(extra="allow")

    action: JsonObject = Field(default_factory=dict)
    timeout_s: float | None = Field(default=None, gt=0)
    request_id: str | None = Field(default=None, max_length=255)

    @property
    def parsed_action(self) -> JsonObject:
        """The action, in either form."""
        if "action" in self.model_fields_set:
            return self.action
        return self.model_extra or {}


class _Envelope(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResetMessage(_Envelope):
    """A request to start an episode."""

    type: Literal["reset"]
    data: JsonObject = Field(default_factory=dict)


class StepMessage(_Envelope):
    """A request to take the action in `data`."""

    type: Literal["step"]
    data: JsonObject


class LudusStepMessage(_Envelope):
    """A numbered step whose action is JSON or a language model's text."""

    type: Literal["step"]
    data: JsonObject | None = None
    text: str | None = None
    step_index: int = Field(default=0, ge=0)


class PlainMessage(_Envelope):
    """A request without arguments, for the state or to close the session."""

    type: Literal["state", "close"]


class McpMessage(_Envelope):
    """A JSON-RPC call."""

    type: Literal["mcp"]
    data: JsonObject


def reset_args(
    data: JsonObject, description: EnvironmentDescription, *, lenient: bool
) -> ResetArgs:
    """Read the arguments of a reset.

    Args:
        lenient: ignore options that the environment does not accept, like upstream servers.

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


def observation_payload(result: EncodedResult) -> JsonObject:
    """Return the payload of a reset or step for upstream clients; it contains JSON fragments."""
    return _payload(result, _insert_tensors(result))


def ludus_payload(result: EncodedResult) -> JsonObject:
    """Return the payload of a reset or step with the extensions of Ludus."""
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
    """Return the metadata in an upstream server's payload, or in the payload's observation."""
    observation = data.get("observation")
    inner = observation.get("metadata") if isinstance(observation, dict) else None
    metadata = data.get("metadata") or inner
    return metadata if isinstance(metadata, dict) else {}


def _payload(result: EncodedResult, observation_json: bytes) -> JsonObject:
    payload: JsonObject = {
        "observation": orjson.Fragment(observation_json),
        "reward": result.reward,
        "done": result.terminated or result.truncated,
    }
    if metadata_json := _encode_metadata(result):
        payload["metadata"] = orjson.Fragment(metadata_json)
    return payload


def _insert_tensors(result: EncodedResult) -> bytes:
    """Return the observation, with its separate arrays inserted where it contains a null."""
    if not result.tensors:
        return result.observation_json
    observation = orjson.loads(result.observation_json)
    for path, array in result.tensors.items():
        *parents, leaf = path.split(".")
        parent: Any = observation
        for name in parents:
            parent = _get_child(parent, name)
        if isinstance(parent, dict) and leaf in parent and parent[leaf] is None:
            parent[leaf] = _array_json(array)
        elif isinstance(parent, list) and leaf.isdecimal() and _get_child(parent, leaf) is None:
            parent[int(leaf)] = _array_json(array)
    return orjson.dumps(observation)


def _get_child(parent: Any, name: str) -> Any:
    if isinstance(parent, dict):
        return parent.get(name)
    is_index = isinstance(parent, list) and name.isdecimal() and int(name) < len(parent)
    return parent[int(name)] if is_index else ()


def read_tensors_json(tensors: list[JsonObject]) -> dict[str, np.ndarray]:
    """Return the arrays in a payload's `tensors` by name."""
    return {
        tensor["name"]: np.frombuffer(
            base64.b64decode(tensor["data"]), np.dtype(tensor["dtype"]).newbyteorder("<")
        ).reshape(tensor["shape"])
        for tensor in tensors
    }


def ludus_metadata(description: EnvironmentDescription) -> JsonObject:
    """Return the `ludus` value of /metadata. Its presence shows that the extensions exist."""
    content = asdict(description)
    for name in (*_METADATA_FIELDS, *(f"{name}_schema" for name in _SCHEMAS), "linger_s"):
        del content[name]
    if description.reset_options is not None:
        content["reset_options"] = sorted(description.reset_options)
    return content


def read_metadata(metadata: JsonObject, schema: JsonObject) -> EnvironmentDescription:
    """Return the description in the responses of /metadata and /schema, of any server."""
    content = {"has_text_view": False, "max_sessions": 0, **(metadata.get("ludus") or {})}
    content |= {name: metadata.get(name) or "" for name in _METADATA_FIELDS}
    content |= {f"{name}_schema": schema.get(name) or {} for name in _SCHEMAS}
    return _DESCRIPTIONS.validate_python(content)


def frame(kind: str, data: Any) -> bytes:
    """Return a server's WebSocket frame."""
    return orjson.dumps({"type": kind, "data": data})


def error_data(error: EnvError, sessions: Sessions, *, upstream: bool) -> JsonObject:
    """Return the `data` of an error frame, and release the error's traceback.

    Upstream clients get OpenEnv's messages.
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
        data |= (
            validation_error_data(cause) if upstream else {"errors": limit_faults(cause.errors())}
        )
    elif error.code is ErrorCode.EXECUTION_ERROR and upstream and cause is not None:
        data["message"] = error_message(cause)
    return data


def validation_error_data(error: ValidationError) -> JsonObject:
    """Return the `data` of the error frame for a message that violates its schema."""
    return {
        "message": "Invalid message",
        "code": str(ErrorCode.VALIDATION_ERROR),
        "errors": limit_faults(error.errors()),
    }


def limit_faults(faults: Sequence[Mapping[str, Any]]) -> orjson.Fragment:
    """Return pydantic's list of faults as JSON, without their input if that is large."""
    try:
        encoded_faults = orjson.dumps(faults, default=str)
    except TypeError:  # the input is nested too deeply
        encoded_faults = b""
    if not encoded_faults or len(encoded_faults) > MAX_FAULTS_BYTES:
        plain = [{key: fault[key] for key in ("type", "loc", "msg")} for fault in faults[:20]]
        encoded_faults = orjson.dumps(plain, default=str)
    return orjson.Fragment(encoded_faults)


def _encode_metadata(result: EncodedResult) -> bytes:
    """Return the metadata and the success as JSON; empty if there is neither."""
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

"""Encoding of environments' results, shared by all wires."""

from __future__ import annotations

import copy
import math
import operator
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
from pydantic import ValidationError

from ludus.env.environment import TextRenderer
from ludus.env.incoming.faults import MAX_REPEATED_BYTES, list_faults, shorten, shorten_input
from ludus.env.limits import MAX_RESULT_BYTES
from ludus.env.text.unicode import dump_json, replace_surrogates
from ludus.env.types import (
    MESSAGE_ROLES,
    Action,
    JsonObject,
    ToolResult,
    Transition,
    has_message_role,
)
from ludus.proto.errors import ErrorCode, ExecutionError, InvalidCallError
from ludus.proto.rewards import REWARD_RULE, is_valid_reward

SUCCESS_KEY = "success"
"""Key of the metadata of an episode's last observation, for OpenEnv."""
MAX_SEED = 2**64 - 1
_DRAWN_SEED_BITS = 32
"""Number of bits of random seeds; some environments accept no larger seeds."""
_MAX_LISTED_FAULTS = 20
_TENSOR_KINDS = frozenset("biufc")
"""NumPy kinds that every client can read: booleans, integers, real and complex numbers."""
_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


@dataclass(slots=True)
class ResetArgs:
    """Arguments of a reset; must not be changed (see `EncodedResult`)."""

    seed: int | None = None
    episode_id: str = ""
    options: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seed is None:
            return
        try:
            seed = operator.index(self.seed)  # JSON cannot encode NumPy's integers
        except TypeError:
            seed = -1
        if not 0 <= seed <= MAX_SEED:
            raise InvalidCallError(f"seed must be from 0 to {MAX_SEED}, got {self.seed!r}")
        self.seed = seed


class DefaultSeeds:
    """Default seeds of resets: `first_seed`, then 1 more each time; random if it is None."""

    def __init__(self, first_seed: int | None = None) -> None:
        self._next_seed = first_seed

    def fill(self, args: ResetArgs) -> ResetArgs:
        """Return the arguments with a seed."""
        if args.seed is not None:
            return args
        if self._next_seed is None:
            return replace(args, seed=secrets.randbits(_DRAWN_SEED_BITS))
        self._next_seed += 1
        return replace(args, seed=self._next_seed - 1)


@dataclass(slots=True)
class EncodedText:
    """A text view with messages as JSON; must not be changed (see `EncodedResult`)."""

    messages_json: bytes
    legal_answers: list[str]


@dataclass(slots=True)
class EncodedResult:
    """A transition that every wire can send; its JSON parts are copied and never parsed.

    It must not be changed. It is not frozen, because every step makes one and a frozen dataclass
    takes three times as long to make.
    """

    step_index: int
    observation_json: bytes
    metadata_json: bytes
    """Copy of the observation's metadata as JSON; empty without metadata."""
    info_json: bytes
    """Info as JSON; empty without info."""
    reward: float | None
    terminated: bool
    truncated: bool
    tensors: dict[str, np.ndarray]
    text: EncodedText | None
    success: bool | None = None

    @property
    def done(self) -> bool:
        """True if the episode is over, for either reason."""
        return self.terminated or self.truncated

    @property
    def num_bytes(self) -> int:
        """Approximate size in a message."""
        num_bytes = 128 + len(self.observation_json) + len(self.info_json)
        num_bytes += len(self.metadata_json)
        if self.text is not None:
            num_bytes += len(self.text.messages_json) + _measure_answers(self.text.legal_answers)
        if self.tensors:
            num_bytes += sum(array.nbytes for array in self.tensors.values())
        return num_bytes


@dataclass(slots=True)
class EncodedToolResult:
    """The result of a tool call that every wire can send; must not be changed."""

    content_json: bytes
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None

    @property
    def done(self) -> bool:
        """True if the call ended the episode, for either reason."""
        return self.terminated or self.truncated


def encode_tool_result(name: str, result: JsonObject | ToolResult) -> EncodedToolResult:
    """Encode the result of the tool `name` as JSON.

    Raises:
        ExecutionError: no wire can encode the result. Other errors have the same cause.
    """
    if not isinstance(result, ToolResult):
        result = ToolResult(result)
    content_json = dump_json(result.content)
    check_size(f"a result of tool '{name}'", len(content_json))
    reward, success = result.reward, result.success
    return EncodedToolResult(
        content_json,
        None if reward is None else _check_reward(reward),
        bool(result.terminated),
        bool(result.truncated),
        None if success is None else bool(success),
    )


def encode_transition(
    transition: Transition[Any], renderer: TextRenderer[Any, Any] | None, step_index: int
) -> EncodedResult:
    """Encode a transition as JSON with its text view. U+FFFD replaces lone surrogates.

    Raises:
        ExecutionError: no wire can encode the transition. Other errors have the same cause.
    """
    text = None
    if renderer is not None:
        observation = transition.observation
        messages = _check_messages(renderer.render(observation, first=step_index == 0))
        text = EncodedText(
            _copy_to_exact_size(dump_json(messages)),
            _check_answers(renderer.legal_answers(observation)),
        )
    observation_json, metadata = _encode_observation(transition)
    reward, info, success = transition.reward, transition.info, transition.success
    encoded_result = EncodedResult(
        step_index,
        _copy_to_exact_size(observation_json),
        _to_json(metadata) if metadata else b"",
        _to_json(info) if info else b"",
        None if reward is None else _check_reward(reward),
        bool(transition.terminated),
        bool(transition.truncated),
        _check_tensors(transition.tensors) if transition.tensors else {},
        text,
        None if success is None else bool(success),
    )
    check_size("an encoded observation", encoded_result.num_bytes)
    return encoded_result


def read_success(metadata: JsonObject, *, is_done: bool) -> bool | None:
    """Return the success in the metadata of an episode's end, as OpenEnv reports it."""
    success = metadata.get(SUCCESS_KEY)
    return success if is_done and isinstance(success, bool) else None


def check_size(part_name: str, num_bytes: int) -> None:
    """Check that data is small enough to send.

    Raises:
        ExecutionError: the data is larger than `MAX_RESULT_BYTES`.
    """
    if num_bytes > MAX_RESULT_BYTES:
        raise ExecutionError(
            f"{part_name} cannot have more than {MAX_RESULT_BYTES} bytes, got {num_bytes}"
        )


def encode_json(value: Any, part_name: str) -> bytes:
    """Encode a part of a call as JSON. Parsers accept deeper nesting than encoders.

    Raises:
        InvalidCallError: the value is nested too deep, or JSON cannot encode it.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise make_encode_error(part_name, error) from None


def make_encode_error(part_name: str, error: Exception) -> InvalidCallError:
    """Build the error of a part of a call that cannot be encoded, the same on every wire."""
    return InvalidCallError(
        f"{part_name} must be plain JSON, at most 254 levels deep, with integers of at most 64 bits"
        f" and string keys: {error}; send anything else as a string"
    )


def replace_nan(row: Mapping[str, Any]) -> JsonObject:
    """Replace each NaN, which is how pandas writes a missing value, by None.

    Raises:
        ValueError: a number is infinite, which JSON cannot encode.
    """
    plain_row = {}
    for name, value in row.items():
        try:
            plain_row[name] = _replace_nan_in_value(value)
        except OverflowError:
            raise ValueError(
                f"column '{name}' contains an infinite number, which JSON cannot encode;"
                " leave it out, or use a large number"
            ) from None
    return plain_row


def _replace_nan_in_value(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist() if value.dtype.kind == "f" else value
    if isinstance(value, float):
        if math.isinf(value):
            raise OverflowError
        return None if math.isnan(value) else value
    if isinstance(value, (list, tuple)):
        return [_replace_nan_in_value(element) for element in value]
    if isinstance(value, dict):
        return {name: _replace_nan_in_value(element) for name, element in value.items()}
    return value


def decode_action(action_type: type[Action], action_json: bytes) -> Action:
    """Parse an action of the given type.

    Raises:
        InvalidCallError: the JSON does not match. The cause is pydantic's ValidationError, unless
            the action is too large to be repeated in a reply.
    """
    try:
        return action_type.from_json(action_json)
    except ValidationError as error:
        is_small = len(action_json) <= MAX_REPEATED_BYTES
        action_error = _make_action_error(action_type, error, with_input=is_small)
        raise action_error from error if is_small else None


def _make_action_error(
    action_type: type[Action], error: ValidationError, *, with_input: bool
) -> InvalidCallError:
    faults = list_faults(error, with_input=with_input)
    if faults[0]["type"] == "json_invalid":
        return InvalidCallError(f"Invalid JSON: {faults[0]['msg']}", ErrorCode.INVALID_JSON)
    descriptions = "; ".join(_describe_fault(fault) for fault in faults[:_MAX_LISTED_FAULTS])
    if len(faults) > _MAX_LISTED_FAULTS:
        descriptions += f"; and {len(faults) - _MAX_LISTED_FAULTS} more"
    fields = ", ".join(action_type.model_fields)
    return InvalidCallError(
        f"the action must be of type {action_type.__name__} ({fields}): {descriptions}"
    )


def _encode_observation(transition: Transition[Any]) -> tuple[bytes, JsonObject]:
    try:
        return transition.encode_observation()
    except (TypeError, ValueError):  # encoders raise either for a surrogate
        encodable_transition = copy.copy(transition)
        encodable_transition.observation = replace_surrogates(transition.observation)
        return encodable_transition.encode_observation()


def _describe_fault(fault: JsonObject) -> str:
    path = ".".join(str(key) for key in fault["loc"]) or "action"
    description = f"{shorten(path)}: {shorten(fault['msg'])}"
    if "input" in fault:
        description += f", got {shorten_input(fault['input'])}"
    return description


def _check_reward(reward: Any) -> float:
    checked_reward = float(reward)
    if not is_valid_reward(checked_reward):
        raise ExecutionError(f"reward must be {REWARD_RULE}, or None, got {checked_reward}")
    return checked_reward


def _check_messages(messages: Any) -> Any:
    # Values of other shapes are refused where the messages are used.
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict) and "role" in message and not has_message_role(message):
            raise ExecutionError(
                f"each message of a renderer must have one of the roles {', '.join(MESSAGE_ROLES)},"
                f" got {message!a:.200}"
            )
    return messages


def _check_answers(answers: Any) -> list[str]:
    try:
        if type(answers) is not list:
            raise TypeError
        _measure_answers(answers)
    except UnicodeEncodeError:
        return [replace_surrogates(answer) for answer in answers]
    except TypeError:
        raise ExecutionError(
            f"legal_answers must be a list of strings, got {answers!a:.200}"
        ) from None
    return answers


def _measure_answers(answers: list[str]) -> int:
    """Return the approximate size of the answers in a message; raises if one is not a string."""
    return len("".join(answers).encode()) + 4 * len(answers)


def _check_tensors(tensors: Any) -> dict[str, np.ndarray]:
    for name, array in tensors.items():
        is_array = isinstance(array, np.ndarray)
        if not is_array or array.dtype.kind not in _TENSOR_KINDS:
            array_type = f"dtype {array.dtype}" if is_array else type(array).__name__
            raise ExecutionError(
                f"tensor {name!r} must be a NumPy array of numbers, got {array_type}"
            )
        if not isinstance(name, str):
            raise ExecutionError(f"names of tensors must be strings, got {name!r}")
    checked_tensors: dict[str, np.ndarray] = {
        replace_surrogates(name): array for name, array in tensors.items()
    }
    return checked_tensors


def _to_json(value: JsonObject) -> bytes:
    return _copy_to_exact_size(dump_json(value, _JSON_OPTIONS))


def _copy_to_exact_size(encoded_bytes: bytes) -> bytes:
    """Copy bytes into a block of their exact size.

    orjson writes into blocks of at least a kilobyte and cuts them off at the end. Sessions keep
    their last result, and the memory between thousands of these blocks stays unused. It made a
    server's memory twelve times the size of its results.
    """
    return bytes(memoryview(encoded_bytes))

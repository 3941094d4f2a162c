"""From what an environment returns to what travels, once for all wires."""

from __future__ import annotations

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
from ludus.env.limits import MAX_RESULT_BYTES
from ludus.env.types import Action, JsonObject, Transition
from ludus.proto.errors import ErrorCode, ExecutionError, InvalidCallError

SUCCESS_KEY = "success"
"""In the metadata of an episode's last observation, where OpenEnv has room for it."""
MAX_SEED = 2**64 - 1
_DRAWN_SEED_BITS = 32
"""Some environments take no larger seed."""
_TENSOR_KINDS = frozenset("biufc")
"""Booleans, integers, floating and complex numbers: what every client can read."""
_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


@dataclass(slots=True)
class ResetArgs:
    """What a reset may ask for; nobody changes one (see `EncodedResult` for why it could be)."""

    seed: int | None = None
    episode_id: str = ""
    options: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seed is None:
            return
        try:
            seed = operator.index(self.seed)  # one of NumPy's is no number to JSON
        except TypeError:
            seed = -1
        if not 0 <= seed <= MAX_SEED:
            raise InvalidCallError(f"expected a seed from 0 to {MAX_SEED}, got {self.seed!r}")
        self.seed = seed


class DefaultSeeds:
    """Seeds for resets that come without one: `first`, then the next; drawn where it is None."""

    def __init__(self, first: int | None = None) -> None:
        self._next = first

    def fill(self, args: ResetArgs) -> ResetArgs:
        """The arguments with a seed."""
        if args.seed is not None:
            return args
        if self._next is None:
            return replace(args, seed=secrets.randbits(_DRAWN_SEED_BITS))
        self._next += 1
        return replace(args, seed=self._next - 1)


@dataclass(slots=True)
class EncodedText:
    """A text view whose messages are JSON already; nobody changes one (see `EncodedResult`)."""

    messages_json: bytes
    legal_answers: list[str]


@dataclass(slots=True)
class EncodedResult:
    """A transition ready for any wire; JSON parts are bytes that are copied, never parsed.

    Nobody changes one. It is not frozen because there is one for every step, and making a
    frozen one takes three times as long.
    """

    step_index: int
    observation_json: bytes
    metadata_json: bytes
    """The observation's metadata once more; empty when it has none."""
    info_json: bytes
    """Empty when there is no info."""
    reward: float | None
    terminated: bool
    truncated: bool
    tensors: dict[str, np.ndarray]
    text: EncodedText | None
    success: bool | None = None

    @property
    def done(self) -> bool:
        """True when the episode is over, for either reason."""
        return self.terminated or self.truncated

    @property
    def num_bytes(self) -> int:
        """About how much room it takes in a message."""
        num_bytes = 128 + len(self.observation_json) + len(self.info_json)
        num_bytes += len(self.metadata_json)
        if self.text is not None:
            num_bytes += len(self.text.messages_json) + _num_bytes_of(self.text.legal_answers)
        if self.tensors:
            num_bytes += sum(array.nbytes for array in self.tensors.values())
        return num_bytes


def encode_transition(
    transition: Transition[Any], renderer: TextRenderer[Any, Any] | None, step_index: int
) -> EncodedResult:
    """The transition with everything that varies turned into JSON, and its text view.

    Raises:
        ExecutionError: it holds what no wire can carry; other errors are of the same kind.
    """
    text = None
    if renderer is not None:
        observation = transition.observation
        messages = renderer.render(observation, first=step_index == 0)
        text = EncodedText(
            _fitted(orjson.dumps(messages)), _checked_answers(renderer.legal_answers(observation))
        )
    observation_json, metadata = transition.encoded_observation()
    reward, info, success = transition.reward, transition.info, transition.success
    encoded = EncodedResult(
        step_index,
        _fitted(observation_json),
        _json_of(metadata) if metadata else b"",
        _json_of(info) if info else b"",
        None if reward is None else _checked_reward(reward),
        bool(transition.terminated),
        bool(transition.truncated),
        _checked_tensors(transition.tensors) if transition.tensors else {},
        text,
        None if success is None else bool(success),
    )
    check_size("an observation with what belongs to it", encoded.num_bytes)
    return encoded


def read_success(metadata: JsonObject, *, is_done: bool) -> bool | None:
    """Whether an episode succeeded, as the metadata that came with its end says in OpenEnv."""
    success = metadata.get(SUCCESS_KEY)
    return success if is_done and isinstance(success, bool) else None


def check_size(what: str, num_bytes: int) -> None:
    """Refuse what is too large to travel.

    Raises:
        ExecutionError: it has more than `MAX_RESULT_BYTES`.
    """
    if num_bytes > MAX_RESULT_BYTES:
        raise ExecutionError(
            f"expected {what} of at most {MAX_RESULT_BYTES} bytes, got {num_bytes}"
        )


def plain_json(value: Any, what: str) -> bytes:
    """A part of a call as it travels on: parsers take deeper nesting than writers do.

    Raises:
        InvalidCallError: it is nested too deep, or holds what JSON has no room for.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise unwritable(what, error) from None


def unwritable(what: str, error: Exception) -> InvalidCallError:
    """The refusal of a part of a call that cannot be written, the same on every wire."""
    return InvalidCallError(
        f"expected {what} of plain JSON, at most 254 levels deep, with integers of at most 64 bits"
        f" and no keys but strings: {error}; send anything else as a string"
    )


def row_without_nan(row: Mapping[str, Any]) -> JsonObject:
    """The row with None for each NaN, which is how pandas writes that a value is missing.

    Raises:
        ValueError: a number is infinite. JSON has none, and it would travel as one that is missing.
    """
    try:
        return {name: _without_nan(value) for name, value in row.items()}
    except OverflowError:
        found = next(name for name, value in row.items() if _is_infinite(value))
        raise ValueError(
            f"column '{found}' holds an infinite number, which JSON cannot hold; leave it out, or "
            "write a large one"
        ) from None


def _without_nan(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist() if value.dtype.kind == "f" else value
    if isinstance(value, float):
        if math.isinf(value):
            raise OverflowError
        return None if math.isnan(value) else value
    if isinstance(value, (list, tuple)):
        return [_without_nan(one) for one in value]
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    return value


def _is_infinite(value: Any) -> bool:
    try:
        _without_nan(value)
    except OverflowError:
        return True
    return False


def decode_action(action_type: type[Action], action_json: bytes) -> Action:
    """The typed action that the JSON describes.

    Raises:
        InvalidCallError: the JSON does not fit; the cause is pydantic's ValidationError.
    """
    try:
        return action_type.from_json(action_json)
    except ValidationError as error:
        raise _invalid_action(action_type, error) from error


def _invalid_action(action_type: type[Action], error: ValidationError) -> InvalidCallError:
    faults = error.errors(include_url=False, include_context=False)
    if faults[0]["type"] == "json_invalid":
        return InvalidCallError(f"Invalid JSON: {faults[0]['msg']}", ErrorCode.INVALID_JSON)
    described = "; ".join(
        f"{'.'.join(str(part) for part in fault['loc']) or 'action'}: {fault['msg']},"
        f" got {fault['input']!r}"
        for fault in faults
    )
    fields = ", ".join(action_type.model_fields)
    return InvalidCallError(
        f"expected an action of type {action_type.__name__} ({fields}): {described}"
    )


def _checked_reward(reward: Any) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise ExecutionError(f"expected a reward that is a finite number or None, got {value}")
    return value


def _checked_answers(answers: Any) -> list[str]:
    try:
        if type(answers) is not list:
            raise TypeError
        _num_bytes_of(answers)
    except (TypeError, UnicodeEncodeError):
        raise ExecutionError(
            f"expected legal_answers to be a list of strings, got {answers!a:.200}"
        ) from None
    return answers


def _num_bytes_of(answers: list[str]) -> int:
    """About what the answers take in a message; joining them looks at their types, too."""
    return len("".join(answers).encode()) + 4 * len(answers)


def _checked_tensors(tensors: Any) -> dict[str, np.ndarray]:
    for name, array in tensors.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in _TENSOR_KINDS:
            got = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ExecutionError(
                f"expected tensor {name!r} to be a NumPy array of numbers, got {got}"
            )
        if not isinstance(name, str):
            raise ExecutionError(f"expected names of tensors to be strings, got {name!r}")
        name.encode()
    checked: dict[str, np.ndarray] = tensors
    return checked


def _json_of(value: JsonObject) -> bytes:
    return _fitted(orjson.dumps(value, option=_JSON_OPTIONS))


def _fitted(written: bytes) -> bytes:
    """The same bytes in a block of their own size.

    orjson writes into a block of a kilobyte or more and cuts it down at the end. Sessions keep
    their last answer, and between thousands of those the cut-off ends hold nothing else: memory
    of a server was twelve times that of its answers.
    """
    return bytes(memoryview(written))

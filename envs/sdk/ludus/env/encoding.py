"""From what an environment returns to what travels, once for all wires."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
from pydantic import ValidationError

from ludus.env.environment import TextRenderer
from ludus.env.types import Action, JsonObject, Transition
from ludus.proto.errors import ErrorCode, InvalidCallError

MAX_SEED = 2**64 - 1
_DRAWN_SEED_BITS = 32
"""Some environments take no larger seed."""
_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


@dataclass(slots=True)
class ResetArgs:
    """What a reset may ask for; nobody changes one (see `EncodedResult` for why it could be)."""

    seed: int | None = None
    episode_id: str = ""
    options: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidCallError(f"expected a seed from 0 to {MAX_SEED}, got {self.seed}")


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

    @property
    def done(self) -> bool:
        """True when the episode is over, for either reason."""
        return self.terminated or self.truncated

    @property
    def num_bytes(self) -> int:
        """About how much room it takes in a message."""
        num_bytes = 128 + len(self.observation_json) + len(self.info_json)
        if self.text is not None:
            num_bytes += len(self.text.messages_json)
        if self.tensors:
            num_bytes += sum(array.nbytes for array in self.tensors.values())
        return num_bytes


def encode_transition(
    transition: Transition[Any], renderer: TextRenderer[Any, Any] | None, step_index: int
) -> EncodedResult:
    """The transition with everything that varies turned into JSON, and its text view."""
    text = None
    if renderer is not None:
        observation = transition.observation
        messages = renderer.render(observation, first=step_index == 0)
        text = EncodedText(orjson.dumps(messages), renderer.legal_answers(observation))
    observation_json, metadata = transition.encoded_observation()
    reward, info = transition.reward, transition.info
    return EncodedResult(
        step_index,
        observation_json,
        _json_of(metadata) if metadata else b"",
        _json_of(info) if info else b"",
        None if reward is None else float(reward),
        bool(transition.terminated),
        bool(transition.truncated),
        transition.tensors,
        text,
    )


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


def _json_of(value: JsonObject) -> bytes:
    return orjson.dumps(value, option=_JSON_OPTIONS)

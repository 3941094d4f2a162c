"""A `StepResult` of the gRPC client whose JSON is parsed on first access.

A loop over hundreds of sessions reads rewards and flags, and a language model's player reads the
text. Few callers read everything, and parsing everything costs the client as much as the call.
"""

from __future__ import annotations

from typing import Any

import orjson

from ludus.env.messages.protobuf import read_tensors
from ludus.env.types import StepResult, TextView
from ludus.proto.env.v1 import env_pb2 as pb


class LazyStepResult(StepResult):
    """A StepResult that is parsed on first access, and equal to an eager one with its values.

    It keeps bytes instead of the message, because a message would keep its whole batch in memory.
    """

    __slots__ = ("_unparsed",)
    _unparsed: tuple[bytes, bytes, tuple[bytes, list[str]] | None]

    def __getattr__(self, name: str) -> Any:
        """Parse a field and store it in its slot, so that the next access finds it there."""
        if name not in _SET_LAZILY:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        observation_json, info_json, text = self._unparsed
        value: Any
        if name == "observation":
            value = orjson.loads(observation_json)
        elif name == "info":
            value = orjson.loads(info_json) if info_json else {}
        else:
            value = TextView(orjson.loads(text[0]), text[1]) if text is not None else None
        _SET_LAZILY[name](self, value)
        return value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepResult):
            return NotImplemented
        return _field_values(self) == _field_values(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[StepResult], tuple[Any, ...]]:
        return StepResult, _field_values(self)


_NAMES = tuple(StepResult.__dataclass_fields__)
_SETTERS: dict[str, Any] = {name: vars(StepResult)[name].__set__ for name in _NAMES}
"""Slot setters. They bypass the frozen `__setattr__`, which costs more than the values."""
_SET_LAZILY = {name: _SETTERS[name] for name in ("observation", "info", "text")}
_set_unparsed: Any = vars(LazyStepResult)["_unparsed"].__set__
_set_reward = _SETTERS["reward"]
_set_terminated = _SETTERS["terminated"]
_set_truncated = _SETTERS["truncated"]
_set_step_index = _SETTERS["step_index"]
_set_tensors = _SETTERS["tensors"]
_set_success = _SETTERS["success"]
_new = LazyStepResult.__new__


def read_result(message: pb.StepResult) -> StepResult:
    """Convert a result message to the client's result."""
    result = _new(LazyStepResult)
    text = None
    if message.HasField("text"):
        text = (message.text.messages_json, list(message.text.legal_answers))
    _set_unparsed(result, (message.observation_json, message.info_json, text))
    _set_reward(result, message.reward if message.HasField("reward") else None)
    _set_terminated(result, message.terminated)
    _set_truncated(result, message.truncated)
    _set_step_index(result, message.step_index)
    _set_tensors(result, read_tensors(message.tensors) if message.tensors else {})
    _set_success(result, message.success if message.HasField("success") else None)
    return result


def _field_values(result: StepResult) -> tuple[Any, ...]:
    return tuple(getattr(result, name) for name in _NAMES)

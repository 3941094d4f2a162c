"""What a client gets over gRPC: a `StepResult` whose JSON is parsed when somebody looks.

A loop over hundreds of sessions looks at rewards and flags, a language model's player at
the text, few at everything; parsing all of it costs the client as much as the call itself.
"""

from __future__ import annotations

from typing import Any

import orjson

from ludus.env.messages.protobuf import read_tensors
from ludus.env.types import StepResult, TextView
from ludus.proto.env.v1 import env_pb2 as pb


class LazyStepResult(StepResult):
    """A StepResult in every respect; equal to an eager one with the same values.

    It holds bytes and never the message, which would keep its whole batch in memory.
    """

    __slots__ = ("_unparsed",)
    _unparsed: tuple[bytes, bytes, tuple[bytes, list[str]] | None]

    def __getattr__(self, name: str) -> Any:
        """A field that was not parsed yet; the next look finds it in its slot."""
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
        """True for any StepResult with the same values."""
        if not isinstance(other, StepResult):
            return NotImplemented
        return _values_of(self) == _values_of(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[StepResult], tuple[Any, ...]]:
        return StepResult, _values_of(self)


_NAMES = tuple(StepResult.__dataclass_fields__)
_SETTERS: dict[str, Any] = {name: vars(StepResult)[name].__set__ for name in _NAMES}
"""Past the frozen `__setattr__`, which costs more than the values."""
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
    """What a client is given for a result message."""
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


def _values_of(result: StepResult) -> tuple[Any, ...]:
    return tuple(getattr(result, name) for name in _NAMES)

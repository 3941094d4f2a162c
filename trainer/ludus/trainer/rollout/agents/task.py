"""The task that an agent receives, and the result that it returns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ludus.env import Message
from ludus.proto.errors import AgentError

MAX_QUOTED_CHARACTERS = 200
_RESULT_KEYS = ("answer", "action", "reward")


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The first result of an episode, which is sent to the agent as JSON."""

    text: str
    """Text of all messages."""
    messages: Sequence[Message]
    observation: Mapping[str, Any]
    info: Mapping[str, Any]
    """Info of the result; for a data set, the columns of the row."""
    seed: int

    def to_json(self) -> str:
        """Return the task as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result that an agent returns for an episode."""

    answer: str | None = None
    """Text that the environment parses as an action; None if there is none."""
    action: Any = None
    """Action that needs no parsing; None if there is none."""
    reward: float = 0.0
    """Additional reward that the agent assigns to the episode."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All other fields, for reward functions."""


def read_result(
    value: Any, form: Literal["json", "text", "last_message", "none"], last_text: str
) -> AgentResult:
    """Return the result in a text or an object, which the configuration's `form` describes.

    Args:
        last_text: text of the last completion, which is the answer of "last_message".

    Raises:
        AgentError: the value does not have this form.
    """
    match form:
        case "none":
            return AgentResult()
        case "last_message":
            fields = value if isinstance(value, dict) else {}
            return AgentResult(answer=last_text, fields=fields)
        case "text":
            if not isinstance(value, str):
                raise AgentError(
                    f"expected a text (agent.answer = 'text'), got {_quote(value)}; return only "
                    "the answer, or set agent.answer = 'json'"
                )
            return AgentResult(answer=value.strip())
    result = _read_object(value)
    action, reward = result.get("action"), result.get("reward", 0.0)
    answer = result.get("answer")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise AgentError(f"expected a finite number as reward, got {_quote(reward)}")
    if answer is not None and action is not None:
        raise AgentError("expected an answer or an action, got both; return only one of them")
    return AgentResult(
        answer=answer if answer is None or isinstance(answer, str) else str(answer),
        action=action,
        reward=float(reward),
        fields={key: entry for key, entry in result.items() if key not in _RESULT_KEYS},
    )


def _read_object(value: Any) -> dict[str, Any]:
    """Return the object, or the object in the last line of a text; empty for an empty text."""
    if value is None:
        return {}
    if isinstance(value, str):
        lines = [line for line in value.splitlines() if line.strip()]
        if not lines:
            return {}
        try:
            value = json.loads(lines[-1])
        except ValueError:
            raise AgentError(
                'expected JSON like {"answer": "..."} in the last line (agent.answer = \'json\'), '
                f"got {_quote(lines[-1])}; set agent.answer = 'text' if the whole text is the "
                "answer"
            ) from None
    if not isinstance(value, dict):
        raise AgentError(f'expected an object like {{"answer": "..."}}, got {_quote(value)}')
    return value


def _quote(value: Any) -> str:
    return f"{value!r:.{MAX_QUOTED_CHARACTERS}}"

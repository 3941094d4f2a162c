"""What an agent is given of an episode, and what it returns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ludus.env import Message
from ludus.proto.errors import AgentError

OUTPUT_SHOWN_CHARACTERS = 200
_OWN_FIELDS = ("answer", "action", "reward")


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What the environment shows first; travels as JSON."""

    text: str
    """The words of its messages."""
    messages: Sequence[Message]
    observation: Mapping[str, Any]
    info: Mapping[str, Any]
    """What the environment says beside it: of a data set's row, its columns."""
    seed: int

    def to_json(self) -> str:
        """The task as it travels."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Returned:
    """What an agent returned."""

    answer: str | None = None
    """What the environment's parser reads as an action; None where there is none."""
    action: Any = None
    """An action as it is; None where there is none."""
    reward: float = 0.0
    """What the agent itself says that the episode earned."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The rest, for reward functions."""


def read_returned(
    value: Any, form: Literal["json", "text", "last_message", "none"], last_text: str
) -> Returned:
    """What the agent returned, a text or an object, as its configuration says to read it.

    Raises:
        AgentError: it cannot be read so.
    """
    match form:
        case "none":
            return Returned()
        case "last_message":
            fields = value if isinstance(value, dict) else {}
            return Returned(answer=last_text, fields=fields)
        case "text":
            if not isinstance(value, str):
                raise AgentError(
                    f"expected a text (agent.answer = 'text'), got {_shown(value)}; return the "
                    "answer alone, or set agent.answer = 'json'"
                )
            return Returned(answer=value.strip())
    found = _object_of(value)
    action, reward = found.get("action"), found.get("reward", 0.0)
    answer = found.get("answer")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise AgentError(f"expected a finite number as reward, got {_shown(reward)}")
    if answer is not None and action is not None:
        raise AgentError("expected an answer or an action, got both; leave one of them out")
    return Returned(
        answer=None if answer is None else answer if isinstance(answer, str) else str(answer),
        action=action,
        reward=float(reward),
        fields={name: one for name, one in found.items() if name not in _OWN_FIELDS},
    )


def _object_of(value: Any) -> dict[str, Any]:
    """The object itself, or that in the last line of a text; nothing in a text without words."""
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
                f"got {_shown(lines[-1])}; set agent.answer = 'text' where all of it is the answer"
            ) from None
    if not isinstance(value, dict):
        raise AgentError(f'expected an object like {{"answer": "..."}}, got {_shown(value)}')
    return value


def _shown(value: Any) -> str:
    return f"{value!r:.{OUTPUT_SHOWN_CHARACTERS}}"

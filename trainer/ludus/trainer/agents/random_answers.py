"""Stands for the policy in the warm start of a tiny model: it says, at random, what may be said.

    tools offered, legal answers known    a call or an answer, each as likely
    one of the two                        that one

The agent plays its episodes as it always does, so the model is shown the agent's own prompts, its
tools and their results, and learns how calls are written; what is good to call it does not learn.
Arguments are drawn from the tool's JSON schema. A text without a schema of its own is one of the
environment's legal answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.agents.answers import read_said
from ludus.trainer.agents.api_error import LimitError
from ludus.trainer.agents.exchange import Asked, ChatMessage, Said
from ludus.trainer.learner.warm_start import Conversation, Exchange

_LEAST, _MOST = 0, 9
"""Bounds of whole numbers that a schema leaves open."""
_MAX_ITEMS = 2


@dataclass(slots=True)
class _Spoken:
    """A conversation, and the messages that a request which continues it begins with."""

    messages: list[ChatMessage]
    exchanges: Conversation = field(default_factory=list)


class RandomAnswers:
    """Answers one agent's requests."""

    def __init__(self, draw: random.Random, answers: Sequence[str], max_turns: int) -> None:
        """`answers` are the environment's legal ones, as far as it names them."""
        self._draw = draw
        self._answers = answers
        self._left = max_turns
        self._spoken: list[_Spoken] = []

    @property
    def conversations(self) -> list[Conversation]:
        """What was said, for a model to learn from."""
        return [one.exchanges for one in self._spoken]

    async def answer(self, asked: Asked) -> list[Said]:
        """[asked.num] answers.

        Raises:
            LimitError: the episode has had all its turns.
            ConfigError: there is nothing that may be said.
        """
        if asked.num > self._left:
            raise LimitError(
                "the episode has had all its turns", status=403, code="max_turns_reached"
            )
        self._left -= asked.num
        return [self._answer(asked) for _ in range(asked.num)]

    def _answer(self, asked: Asked) -> Said:
        text = self._text(asked)
        said = replace(read_said(text, with_calls=bool(asked.tools)), num_tokens=1)
        spoken = self._continued(asked)
        new = asked.messages[len(spoken.messages) :]
        spoken.exchanges.append(Exchange([one.plain for one in new], text, asked.tools))
        spoken.messages = [*asked.messages, said.as_message]
        return said

    def _continued(self, asked: Asked) -> _Spoken:
        """The conversation that the request continues; a new one where it continues none."""
        for one in reversed(self._spoken):
            begin = asked.messages[: len(one.messages)]
            is_same = [_known_by(m) for m in begin] == [_known_by(m) for m in one.messages]
            if is_same and list(one.exchanges[0].tools) == list(asked.tools):
                return one
        self._spoken.append(_Spoken([]))
        return self._spoken[-1]

    def _text(self, asked: Asked) -> str:
        may_answer = bool(self._answers) and not (asked.must_call and asked.tools)
        if asked.tools and not (may_answer and self._draw.random() < 0.5):
            function = self._draw.choice(asked.tools)["function"]
            arguments = self._value(function["parameters"])
            call = {"name": function["name"], "arguments": arguments}
            return f"<tool_call>{json.dumps(call)}</tool_call>"
        if not self._answers:
            raise ConfigError(
                "model.kind = 'tiny' learns the format from legal answers and calls of tools, but "
                "the environment lists no legal answers and its agent offers no tools; let "
                "legal_answers() of the text_renderer list them, or take model.kind = "
                "'pretrained' with an instruction-tuned model"
            )
        return self._draw.choice(self._answers)

    def _value(self, schema: Any) -> Any:
        """A value that fits the schema, as far as tools' schemas usually go."""
        if not isinstance(schema, dict):
            return self._free_text()
        for name in ("enum", "anyOf", "oneOf"):
            if schema.get(name):
                chosen = self._draw.choice(schema[name])
                return chosen if name == "enum" else self._value(chosen)
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        match kind if isinstance(kind, str) else next(iter(kind or ("any",))):
            case "object":
                given = schema.get("properties") or {}
                return {name: self._value(one) for name, one in given.items()}
            case "array":
                size = self._draw.randint(schema.get("minItems", 0), _MAX_ITEMS)
                return [self._value(schema.get("items")) for _ in range(size)]
            case "integer" | "number":
                least = schema.get("minimum", _LEAST)
                return self._draw.randint(int(least), int(schema.get("maximum", least + _MOST)))
            case "boolean":
                return self._draw.random() < 0.5
            case "null":
                return None
        return self._free_text()

    def _free_text(self) -> str:
        return self._draw.choice(self._answers) if self._answers else ""


def _known_by(message: ChatMessage) -> tuple[Any, ...]:
    return message.role, *message.key

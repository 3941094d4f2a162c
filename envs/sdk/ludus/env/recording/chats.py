"""Episodes of a fixed policy as conversations, for behaviour cloning (docs/sft.md).

observation --render--> messages of the user
observation --policy--> action --the text that the environment parses as it--> response
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from ludus.env.encoding import decode_action
from ludus.env.environment import Action, AnyEnvironment, Observation, TextRenderer
from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject, Message
from ludus.proto.errors import ActionError, ConfigError


@dataclass(frozen=True, slots=True)
class ChatEpisode:
    """An episode as the messages that a language model would have seen and written."""

    seed: int
    messages: list[Message]
    tools: list[JsonObject]
    """Tools of the environment, in the form of chat templates."""
    episode_return: float
    """Sum of the rewards of all steps."""
    success: bool | None
    """Success reported by the environment; None if it is unknown."""

    def to_row(self) -> JsonObject:
        """Return the episode as a row of chat data."""
        row: JsonObject = {"messages": self.messages}
        if self.tools:
            row["tools"] = self.tools
        return {**row, "seed": self.seed, "return": self.episode_return, "success": self.success}


def play_chat(
    environment: AnyEnvironment, policy: FixedPolicy, seed: int, max_turns: int
) -> ChatEpisode:
    """Play an episode and return it as a conversation.

    Args:
        max_turns: number of turns after which the episode ends.

    Raises:
        ConfigError: the environment shows no text, or no text stands for an action of the policy.
    """
    renderer = environment.text_renderer
    if renderer is None:
        raise ConfigError(
            f"{type(environment).__name__} shows no text to language models; give it a "
            "text_renderer"
        )
    # The same generator as in an evaluation, so that the policy plays the same episodes.
    generator = random.Random(f"policy {seed}")
    transition = environment.reset(seed=seed)
    messages: list[Message] = []
    num_turns, episode_return = 0, 0.0
    while not (transition.terminated or transition.truncated) and num_turns < max_turns:
        observation = transition.observation
        messages += renderer.render(observation, first=num_turns == 0)
        fields = policy(observation.model_dump(mode="json"), generator)
        action = decode_action(environment.action_type, orjson.dumps(fields))
        messages.append(
            {"role": "assistant", "content": _find_answer(renderer, observation, action)}
        )
        transition = environment.step(action)
        num_turns += 1
        episode_return += transition.reward or 0.0
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema or {"type": "object", "properties": {}},
            },
        }
        for tool in environment.tools
    ]
    return ChatEpisode(seed, messages, tools, episode_return, transition.success)


def _find_answer(renderer: TextRenderer[Any, Any], observation: Observation, action: Action) -> str:
    """Return a text that the renderer parses as the action: a legal answer, if there is one."""
    for answer in _list_candidates(renderer, observation, action):
        try:
            parsed_action = renderer.parse(answer, observation)
        except ActionError:
            continue
        if parsed_action == action:
            return answer
    raise ConfigError(
        f"no text stands for the policy's action {action!r:.200}: the environment parses neither "
        "one of its legal answers nor the action's own values as this action; add the answer to "
        "legal_answers of its text_renderer"
    )


def _list_candidates(
    renderer: TextRenderer[Any, Any], observation: Observation, action: Action
) -> Iterator[str]:
    yield from renderer.legal_answers(observation)
    fields = action.model_dump(mode="json")
    values = [value for name, value in fields.items() if name in action.model_fields_set]
    yield from (value if isinstance(value, str) else json.dumps(value) for value in values)
    yield json.dumps(fields)

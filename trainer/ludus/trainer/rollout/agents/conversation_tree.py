"""The tokens of an agent's episode: a tree of completions, each with its prompt.

           +-- s1 --+-- s2 --+-- s4     p s1 p s2 p s4    trains on s1, s2 and s4
    p -----+        |        +-- s5     p s1 p s2 p s5    trains on s5
           |        +-- s3              p s1 p s3         trains on s3
           +-- s6                       p s6              (a retry, or the second of n = 2)

An agent sends its whole history with each request. The messages are compared with the completions
of this episode. A completion that the agent repeats with the same text and calls is replaced by the
tokens that were sampled, so a history that only grows continues the exact tokens of the previous
completion. Every other request (an edited or shortened history, a retry, parallel requests, a chat
template that removes reasoning) branches off at the last completion that it shares, or starts at
the root. The agent's own messages are encoded by the chat template and never trained on.

Each sampled token is trained on once, in the first sequence that contains it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np

from ludus.env import Message
from ludus.proto.config import RolloutConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.core.interfaces import GenerateFn
from ludus.trainer.core.streams import mix
from ludus.trainer.core.types import SampledCompletion, Sampling, TokenSequence, Turn, TurnSpan
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.agents.endpoint.api_error import ApiError, LimitError
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ChatMessage,
    MessageKey,
    PolicyRequest,
    PolicyResponse,
)
from ludus.trainer.rollout.agents.parsing import ParsedCompletion, parse_completion
from ludus.trainer.rollout.conversation import PlayedTurn


@dataclass(slots=True, eq=False)
class _Node:
    """A completion and its request."""

    parent: _Node | None
    request: PolicyRequest
    parsed: ParsedCompletion
    prompt_ids: list[int]
    """All tokens before the completion."""
    token_ids: list[int]
    """Tokens of the prompt and the completion."""
    reward: float = 0.0
    action: Any = None

    @property
    def added_ids(self) -> list[int]:
        """The tokens of the prompt that follow the parent's tokens."""
        return self.prompt_ids[len(self.parent.token_ids) if self.parent else 0 :]

    @property
    def added_messages(self) -> tuple[ChatMessage, ...]:
        """The messages that follow the parent's completion."""
        return self.request.messages[len(self.parent.request.messages) + 1 if self.parent else 0 :]


class ConversationTree:
    """The policy's side of an agent's episode."""

    def __init__(
        self,
        generate: GenerateFn,
        chat: ChatTokenizer,
        limits: RolloutConfig,
        sampling: Sampling,
        key: int,
    ) -> None:
        """Start an empty tree.

        Args:
            key: determines the random numbers. The same prompts get the same completions, in
                whatever order they arrive.
        """
        self._generate = generate
        self._chat = chat
        self._limits = limits
        self._sampling = sampling
        self._key = key
        self._nodes: list[_Node] = []
        self._nodes_by_key: defaultdict[MessageKey, list[_Node]] = defaultdict(list)
        self._num_requested: Counter[int] = Counter()
        """Number of completions requested for each prompt."""
        self._num_started = 0
        """Number of completions, including those that are being sampled."""
        self.refusal = ""
        """Message of the last request that a limit refused."""
        self.num_tool_calls = 0
        self.num_tool_calls_failed = 0

    async def respond(self, request: PolicyRequest) -> list[PolicyResponse]:
        """Return [request.num] responses, and record their completions as turns.

        Raises:
            LimitError: the run's limits do not allow the completions.
            ApiError: the chat template cannot render the messages.
        """
        prompt_ids = self._encode(request)
        max_tokens = min(
            request.max_tokens or self._limits.max_completion_tokens,
            self._limits.max_completion_tokens,
        )
        self._check_limits(request, len(prompt_ids), max_tokens)
        self._num_started += request.num
        sampling = replace(self._sampling, max_tokens=max_tokens)
        seeds, parent = self._make_seeds(request, prompt_ids), self._find_parent(prompt_ids)
        try:
            completions = await asyncio.gather(
                *(self._generate(prompt_ids, sampling, seed) for seed in seeds)
            )
        except BaseException:
            self._num_started -= request.num
            raise
        return [self._add_node(parent, request, prompt_ids, each) for each in completions]

    @property
    def num_turns(self) -> int:
        """Number of completions so far."""
        return len(self._nodes)

    @property
    def num_branches(self) -> int:
        """Number of sequences beyond the first."""
        return max(0, sum(1 for _ in self._leaves()) - 1)

    @property
    def turns(self) -> list[Turn]:
        """All turns in the order of their completions."""
        return [Turn(node.added_ids, node.parsed.completion, node.reward) for node in self._nodes]

    @property
    def last_text(self) -> str:
        """Content of the last response, without reasoning and calls."""
        return self._nodes[-1].parsed.response.content if self._nodes else ""

    @property
    def prompt(self) -> list[Message]:
        """The messages of the last request up to its first completion."""
        messages = self._last_messages
        return [message.plain for message in messages[: _first_completion(messages)]]

    @property
    def completion(self) -> list[Message]:
        """The other messages of that request, and the last completion."""
        messages = self._last_messages
        return [message.plain for message in messages[_first_completion(messages) :]]

    def add_reward(self, reward: float) -> None:
        """Add to the reward of the last turn."""
        if not self._nodes:
            raise ValueError(f"a reward ({reward:g}) needs a completion first")
        self._nodes[-1].reward += reward

    def record_action(self, action: Any) -> None:
        """Record the action that the last completion caused, unless it is None."""
        if action is not None and self._nodes:
            self._nodes[-1].action = action

    def record_calls(self, num_calls: int, num_failed: int) -> None:
        """Count calls and failed calls of the environment's tools."""
        self.num_tool_calls += num_calls
        self.num_tool_calls_failed += num_failed

    def refuse_if_full(self) -> None:
        """Raise LimitError if a limit has refused a request."""
        if self.refusal:
            raise LimitError(self.refusal)

    def played_turns(self) -> Iterator[PlayedTurn]:
        """Yield the turns in order."""
        for node in self._nodes:
            messages = [message.plain for message in node.added_messages]
            yield PlayedTurn(messages, node.parsed.text, node.action, node.reward)

    def sequences(self, *, include_rest: bool = False) -> tuple[TokenSequence, ...]:
        """Return one sequence for each leaf of the tree, in the order of the leaves.

        The first sequence that contains a completion trains on it. In the others the completion
        belongs to the prompt.
        """
        indices: set[int] = set()
        sequences = []
        for leaf in self._leaves():
            path = [node for node in _path(leaf) if id(node) not in indices]
            indices.update(id(node) for node in path)
            sequences.append(_make_sequence(leaf, path))
        return tuple(sequences)

    def _encode(self, request: PolicyRequest) -> list[int]:
        try:
            if self._chat.keeps_thoughts:
                return self._encode_in_pieces(request)
            messages = [self._restore_reasoning(message) for message in request.messages]
            return self._chat.whole_prompt(messages, request.tools)
        except ConfigError as error:
            raise ApiError(str(error), param="messages") from error

    def _encode_in_pieces(self, request: PolicyRequest) -> list[int]:
        """Encode the agent's messages, and insert sampled completions as their tokens."""
        chat = self._chat
        head, parts = _split_at_completions(request.messages)
        token_ids = chat.first_prompt([message.plain for message in head], request.tools)
        for message, following in parts:
            completion = self._find_completion(message, token_ids)
            if completion is None:
                token_ids += chat.encode_rendered_completion(message.text)
            else:
                token_ids += completion.token_ids
            has_ended = completion is None or completion.has_end_token
            token_ids += chat.next_prompt([each.plain for each in following], ended=has_ended)
        return token_ids

    def _find_completion(
        self, message: ChatMessage, prompt_ids: list[int]
    ) -> SampledCompletion | None:
        """Return the sampled completion that a message repeats, preferably after this prompt."""
        nodes = self._nodes_by_key.get(message.key)
        if not nodes:
            return None
        node = next((node for node in nodes if node.prompt_ids == prompt_ids), nodes[-1])
        return node.parsed.completion

    def _restore_reasoning(self, message: ChatMessage) -> Message:
        """Return the message; a repeated completion gets its reasoning back."""
        plain_message = message.plain
        nodes = self._nodes_by_key.get(message.key) if message.role == "assistant" else None
        return {**plain_message, "content": nodes[-1].parsed.text} if nodes else plain_message

    def _find_parent(self, prompt_ids: list[int]) -> _Node | None:
        """Return the longest node whose tokens the prompt continues."""
        return max(
            (node for node in self._nodes if prompt_ids[: len(node.token_ids)] == node.token_ids),
            key=lambda node: len(node.token_ids),
            default=None,
        )

    def _make_seeds(self, request: PolicyRequest, prompt_ids: list[int]) -> list[int]:
        prompt = crc32(np.array(prompt_ids, dtype=np.int32).tobytes())
        if request.seed is not None:
            return [mix(self._key, prompt, request.seed, number) for number in range(request.num)]
        num_earlier = self._num_requested[prompt]
        self._num_requested[prompt] += request.num
        return [mix(self._key, prompt, num_earlier + number) for number in range(request.num)]

    def _add_node(
        self,
        parent: _Node | None,
        request: PolicyRequest,
        prompt_ids: list[int],
        completion: SampledCompletion,
    ) -> PolicyResponse:
        parsed = parse_completion(self._chat, completion, request, len(prompt_ids))
        token_ids = [*prompt_ids, *parsed.completion.token_ids]
        node = _Node(parent, request, parsed, prompt_ids, token_ids)
        self._nodes.append(node)
        self._nodes_by_key[parsed.response.as_message.key].append(node)
        return parsed.response

    def _check_limits(self, request: PolicyRequest, num_prompt: int, max_tokens: int) -> None:
        limits = self._limits
        if self._num_started + request.num > limits.max_turns:
            self.refusal = (
                f"expected at most rollout.max_turns = {limits.max_turns} completions in an "
                f"episode, got {self._num_started} and a request for {request.num} more"
            )
            raise LimitError(
                self.refusal, status=403, kind="episode_limit", code="max_turns_reached"
            )
        if num_prompt + max_tokens > limits.max_tokens:
            self.refusal = (
                f"expected at most rollout.max_tokens = {limits.max_tokens} tokens of prompt and "
                f"completion, got {num_prompt} and {max_tokens}"
            )
            raise LimitError(self.refusal, param="messages", code="context_length_exceeded")

    @property
    def _last_messages(self) -> list[ChatMessage]:
        if not self._nodes:
            return []
        node = self._nodes[-1]
        message = replace(node.parsed.response.as_message, content=node.parsed.text, calls=())
        return [*node.request.messages, message]

    def _leaves(self) -> Iterator[_Node]:
        """Yield the completions that no other completion continues, in order."""
        parents = {id(node.parent) for node in self._nodes}
        return (node for node in self._nodes if id(node) not in parents)


def _path(leaf: _Node) -> list[_Node]:
    """Return the nodes from the root to the leaf."""
    path: list[_Node] = []
    node: _Node | None = leaf
    while node is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _make_sequence(leaf: _Node, trained: Sequence[_Node]) -> TokenSequence:
    logprobs = np.zeros(len(leaf.token_ids), dtype=np.float32)
    spans = []
    for node in trained:
        start, end = len(node.prompt_ids), len(node.token_ids)
        logprobs[start:end] = node.parsed.completion.logprobs
        spans.append(TurnSpan(start, end, node.reward))
    return TokenSequence(np.array(leaf.token_ids, dtype=np.int32), logprobs, tuple(spans))


def _split_at_completions(
    messages: Sequence[ChatMessage],
) -> tuple[list[ChatMessage], list[tuple[ChatMessage, list[ChatMessage]]]]:
    """Split messages into those before the first completion, and each completion with the rest.

    A completion at the very start, which an agent that shortens its history may send, belongs to
    the first part, because a template cannot render an empty conversation.
    """
    head: list[ChatMessage] = []
    parts: list[tuple[ChatMessage, list[ChatMessage]]] = []
    for message in messages:
        if message.role == "assistant" and head:
            parts.append((message, []))
        elif parts:
            parts[-1][1].append(message)
        else:
            head.append(message)
    return head, parts


def _first_completion(messages: Sequence[ChatMessage]) -> int:
    roles = [message.role for message in messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)

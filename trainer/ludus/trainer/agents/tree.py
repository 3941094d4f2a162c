"""What was said in an agent's episode: a tree of answers, each after the tokens it was asked with.

           +-- s1 --+-- s2 --+-- s4     p s1 p s2 p s4    trains on s1, s2 and s4
    p -----+        |        +-- s5     p s1 p s2 p s5    trains on s5
           |        +-- s3              p s1 p s3         trains on s3
           +-- s6                       p s6              (asked again, or the second of n = 2)

An agent sends its whole history with each request. Its messages are compared, one by one, with what
was sampled in this episode: an answer that comes back as it was told, words and calls, is put in as
the tokens that were sampled, so a history that only grows continues the exact tokens of the answer
before. Whatever does not (an edited or shortened history, a retry, requests side by side, a chat
template that takes thoughts out) branches off at the last answer that it shares, or begins anew.
What is the agent's own is encoded by the chat template, and never trained on.

Each sampled token is trained on once: in the first of the sequences that hold it.
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
from ludus.trainer.agents.answers import Answer, read_answer
from ludus.trainer.agents.api_error import ApiError, LimitError
from ludus.trainer.agents.exchange import Asked, ChatMessage, MessageKey, Said
from ludus.trainer.core.interfaces import GenerateFn
from ludus.trainer.core.streams import mix
from ludus.trainer.core.types import Completion, Sampling, TokenSequence, Turn, TurnSpan
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.conversation import Exchanged


@dataclass(slots=True, eq=False)
class _Node:
    """An answer, and what it was asked with."""

    parent: _Node | None
    asked: Asked
    answer: Answer
    prompt_ids: list[int]
    """All tokens before the answer."""
    token_ids: list[int]
    """With the answer's own."""
    reward: float = 0.0
    action: Any = None

    @property
    def added_ids(self) -> list[int]:
        """The tokens of the prompt after the parent's."""
        return self.prompt_ids[len(self.parent.token_ids) if self.parent else 0 :]

    @property
    def added_messages(self) -> tuple[ChatMessage, ...]:
        """The messages after the parent's answer."""
        return self.asked.messages[len(self.parent.asked.messages) + 1 if self.parent else 0 :]


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
        """`key` decides what is sampled: the same prompt gives the same answers, in any order."""
        self._generate = generate
        self._chat = chat
        self._limits = limits
        self._sampling = sampling
        self._key = key
        self._nodes: list[_Node] = []
        self._by_key: defaultdict[MessageKey, list[_Node]] = defaultdict(list)
        self._times_asked: Counter[int] = Counter()
        """How often each prompt came."""
        self._num_begun = 0
        """Answers, those included that are being sampled."""
        self.refusal = ""
        """What a limit of the run refused last."""
        self.num_tool_calls = 0
        self.num_tool_calls_failed = 0

    async def answer(self, asked: Asked) -> list[Said]:
        """[asked.num] answers, which are turns of the episode from now on.

        Raises:
            LimitError: the run's limits allow no such answer.
            ApiError: the chat template takes no such conversation.
        """
        prompt_ids = self._encoded(asked)
        max_tokens = min(
            asked.max_tokens or self._limits.max_completion_tokens,
            self._limits.max_completion_tokens,
        )
        self._refuse_if_full(asked, len(prompt_ids), max_tokens)
        self._num_begun += asked.num
        sampling = replace(self._sampling, max_tokens=max_tokens)
        seeds, parent = self._seeds(asked, prompt_ids), self._last_answer_of(prompt_ids)
        try:
            completions = await asyncio.gather(
                *(self._generate(prompt_ids, sampling, seed) for seed in seeds)
            )
        except BaseException:
            self._num_begun -= asked.num
            raise
        return [self._keep(parent, asked, prompt_ids, one) for one in completions]

    # -- what the player sees ----------------------------------------------------------

    @property
    def num_turns(self) -> int:
        """Answers so far."""
        return len(self._nodes)

    @property
    def num_branches(self) -> int:
        """Sequences beyond the first."""
        return max(0, sum(1 for _ in self._leaves()) - 1)

    @property
    def turns(self) -> list[Turn]:
        """All answers in the order in which they came."""
        return [Turn(one.added_ids, one.answer.completion, one.reward) for one in self._nodes]

    @property
    def last_text(self) -> str:
        """What the policy has said last, without thoughts and calls."""
        return self._nodes[-1].answer.said.content if self._nodes else ""

    @property
    def prompt(self) -> list[Message]:
        """The messages of the request that was answered last, up to the first answer in it."""
        messages = self._last_messages
        return [one.plain for one in messages[: _first_answer(messages)]]

    @property
    def completion(self) -> list[Message]:
        """The rest of that conversation, and the answer."""
        messages = self._last_messages
        return [one.plain for one in messages[_first_answer(messages) :]]

    def add_reward(self, reward: float) -> None:
        """Add what the episode's last answer has earned."""
        if not self._nodes:
            raise ValueError(f"expected an answer before it earns {reward:g}, got none yet")
        self._nodes[-1].reward += reward

    def acted(self, action: Any) -> None:
        """Note what the last answer made the environment do; None is nothing."""
        if action is not None and self._nodes:
            self._nodes[-1].action = action

    def called(self, num_calls: int, num_failed: int) -> None:
        """Count calls of the environment's tools, of which some failed."""
        self.num_tool_calls += num_calls
        self.num_tool_calls_failed += num_failed

    def refuse_if_full(self) -> None:
        """Raise LimitError where a limit has refused a request."""
        if self.refusal:
            raise LimitError(self.refusal)

    def exchanges(self) -> Iterator[Exchanged]:
        """The answers with what was new to each, for people to read."""
        for node in self._nodes:
            shown = [one.plain for one in node.added_messages]
            yield Exchanged(shown, node.answer.text, node.action, node.reward)

    def sequences(self, *, with_rest: bool = False) -> tuple[TokenSequence, ...]:
        """What the policy has sampled from, one sequence for each end of the tree.

        They stand in the order of their last answers, so that the episode's last stands last. The
        first that holds an answer trains on it; to the others it is what was said before.
        """
        told: set[int] = set()
        sequences = []
        for leaf in self._leaves():
            path = [one for one in _path(leaf) if id(one) not in told]
            told.update(id(one) for one in path)
            sequences.append(_sequence(leaf, path))
        return tuple(sequences)

    # -- tokens ------------------------------------------------------------------------

    def _encoded(self, asked: Asked) -> list[int]:
        try:
            if self._chat.keeps_thoughts:
                return self._joined(asked)
            return self._chat.whole_prompt(self._as_said(asked.messages), asked.tools)
        except ConfigError as error:
            raise ApiError(str(error), param="messages") from error

    def _joined(self, asked: Asked) -> list[int]:
        """The prompt in pieces: what the agent says is encoded, what was sampled stays."""
        chat = self._chat
        head, rest = _before_answers(asked.messages)
        token_ids = chat.first_prompt([one.plain for one in head], asked.tools)
        for answer, following in rest:
            sampled = self._sampled(answer, token_ids)
            if sampled is None:
                token_ids += chat.encode_rendered_completion(answer.text)
            else:
                token_ids += sampled.token_ids
            ended = sampled is None or sampled.has_end_token
            token_ids += chat.next_prompt([one.plain for one in following], ended=ended)
        return token_ids

    def _sampled(self, answer: ChatMessage, prompt_ids: list[int]) -> Completion | None:
        """The tokens of an answer that was sampled: best after this prompt, else anywhere."""
        known = self._by_key.get(answer.key)
        if not known:
            return None
        here = next((one for one in known if one.prompt_ids == prompt_ids), known[-1])
        return here.answer.completion

    def _as_said(self, messages: Sequence[ChatMessage]) -> list[Message]:
        """The messages, answers of the policy with the thoughts that it had."""
        told = []
        for message in messages:
            known = self._by_key.get(message.key) if message.role == "assistant" else None
            plain = message.plain
            told.append({**plain, "content": known[-1].answer.text} if known else plain)
        return told

    def _last_answer_of(self, prompt_ids: list[int]) -> _Node | None:
        """The answer that the prompt continues: of all whose tokens it begins with, the latest."""
        return max(
            (one for one in self._nodes if prompt_ids[: len(one.token_ids)] == one.token_ids),
            key=lambda one: len(one.token_ids),
            default=None,
        )

    def _seeds(self, asked: Asked, prompt_ids: list[int]) -> list[int]:
        prompt = crc32(np.array(prompt_ids, dtype=np.int32).tobytes())
        if asked.seed is not None:
            return [mix(self._key, prompt, asked.seed, number) for number in range(asked.num)]
        before = self._times_asked[prompt]
        self._times_asked[prompt] += asked.num
        return [mix(self._key, prompt, before + number) for number in range(asked.num)]

    def _keep(
        self, parent: _Node | None, asked: Asked, prompt_ids: list[int], completion: Completion
    ) -> Said:
        answer = read_answer(self._chat, completion, asked, len(prompt_ids))
        token_ids = [*prompt_ids, *answer.completion.token_ids]
        node = _Node(parent, asked, answer, prompt_ids, token_ids)
        self._nodes.append(node)
        self._by_key[answer.said.as_message.key].append(node)
        return answer.said

    def _refuse_if_full(self, asked: Asked, num_prompt: int, num_wanted: int) -> None:
        limits = self._limits
        if self._num_begun + asked.num > limits.max_turns:
            self.refusal = (
                f"expected at most rollout.max_turns = {limits.max_turns} answers in an episode, "
                f"got {self._num_begun} and a request for {asked.num} more"
            )
            raise LimitError(
                self.refusal, status=403, kind="episode_limit", code="max_turns_reached"
            )
        if num_prompt + num_wanted > limits.max_tokens:
            self.refusal = (
                f"expected a prompt and an answer of at most rollout.max_tokens = "
                f"{limits.max_tokens} tokens, got {num_prompt} and {num_wanted}"
            )
            raise LimitError(self.refusal, param="messages", code="context_length_exceeded")

    # -- the tree ----------------------------------------------------------------------

    @property
    def _last_messages(self) -> list[ChatMessage]:
        if not self._nodes:
            return []
        last = self._nodes[-1]
        said = replace(last.answer.said.as_message, content=last.answer.text, calls=())
        return [*last.asked.messages, said]

    def _leaves(self) -> Iterator[_Node]:
        """The answers that none continues, in order."""
        parents = {id(one.parent) for one in self._nodes}
        return (one for one in self._nodes if id(one) not in parents)


def _path(leaf: _Node) -> list[_Node]:
    """From the first answer to the leaf."""
    path: list[_Node] = []
    node: _Node | None = leaf
    while node is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _sequence(leaf: _Node, trained: Sequence[_Node]) -> TokenSequence:
    logprobs = np.zeros(len(leaf.token_ids), dtype=np.float32)
    spans = []
    for node in trained:
        start, end = len(node.prompt_ids), len(node.token_ids)
        logprobs[start:end] = node.answer.completion.logprobs
        spans.append(TurnSpan(start, end, node.reward))
    return TokenSequence(np.array(leaf.token_ids, dtype=np.int32), logprobs, tuple(spans))


def _before_answers(
    messages: Sequence[ChatMessage],
) -> tuple[list[ChatMessage], list[tuple[ChatMessage, list[ChatMessage]]]]:
    """The messages before the first answer, and each answer with what follows it.

    An answer at the very beginning, where an agent has cut its history off, is one of the former:
    a template shows no conversation that is empty.
    """
    head: list[ChatMessage] = []
    rest: list[tuple[ChatMessage, list[ChatMessage]]] = []
    for message in messages:
        if message.role == "assistant" and head:
            rest.append((message, []))
        elif rest:
            rest[-1][1].append(message)
        else:
            head.append(message)
    return head, rest


def _first_answer(messages: Sequence[ChatMessage]) -> int:
    return next((n for n, one in enumerate(messages) if one.role == "assistant"), len(messages))

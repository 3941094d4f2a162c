"""The prompts and completions of an episode, and a conversation that records every token.

    add(messages)                        add messages of the environment to the next prompt
    complete()                           sample one turn and return its text
    add_reward(reward)                   add to the reward of the last turn
    record_action(action)                record the action that the last turn caused
    record_calls(num_calls, num_failed)  count tool calls

A prompt consists of the previous prompt, the completion sampled for it, and new messages. If the
chat template removes the reasoning of earlier turns, a prompt may not start with the tokens of the
previous turn. Then it starts another sequence.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ludus.env import Message
from ludus.proto.config import RolloutConfig
from ludus.proto.errors import ConfigError, LudusError
from ludus.proto.runs import TranscriptTurn
from ludus.trainer.core.answer_trie import AnswerTrie
from ludus.trainer.core.interfaces import GenerateFunction
from ludus.trainer.core.streams import mix
from ludus.trainer.core.types import Sampling, TokenSequence, Turn, join_tokens, join_turns
from ludus.trainer.models.chat import (
    ChatTokenizer,
    ToolSpec,
    count_chars,
    is_slow_to_encode,
    is_surely_longer,
)
from ludus.trainer.models.messages import mark_completion
from ludus.trainer.models.system_text import skip_system_messages
from ludus.trainer.models.thoughts import ThoughtForm
from ludus.trainer.rollout.transcript import make_transcript_turn

TurnT = TypeVar("TurnT", bound=Turn)


class ConversationFullError(LudusError):
    """A limit on turns or tokens leaves no room for another completion."""


class PromptError(LudusError):
    """The chat template cannot render the messages of this conversation."""


@dataclass(eq=False)
class EpisodeRecord(ABC, Generic[TurnT]):
    """All prompts and completions of an episode."""

    generate: GenerateFunction
    chat: ChatTokenizer
    limits: RolloutConfig
    sampling: Sampling
    """Sampling parameters, in which `limits` replaces `max_tokens`."""
    key: int
    """Key from which the seed of each completion is derived."""
    turns: list[TurnT] = field(default_factory=list, init=False)
    """All turns, in the order in which they were completed."""
    num_tool_calls: int = field(default=0, init=False)
    """Number of calls to the environment's tools, including failed calls."""
    num_tool_calls_failed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.sampling = replace(self.sampling, max_tokens=self.limits.max_completion_tokens)

    @property
    @abstractmethod
    def prompt(self) -> list[Message]:
        """The messages before the first completion."""

    @property
    @abstractmethod
    def completion(self) -> list[Message]:
        """The messages from the first completion to the last one."""

    @property
    def unanswered(self) -> Sequence[Message]:
        """The messages after the last completion."""
        return ()

    @abstractmethod
    def refuse_if_full(self) -> None:
        """Raise an error if the limits allow no further completion."""

    @property
    def num_branches(self) -> int:
        """Number of sequences that branch off another sequence."""
        return 0

    @property
    def num_turns(self) -> int:
        """Number of turns so far."""
        return len(self.turns)

    def add_reward(self, reward: float) -> None:
        """Add to the reward of the last turn."""
        if not self.turns:
            raise ValueError(
                f"cannot add the reward {reward:g}, because the conversation has no completion yet"
            )
        self.turns[-1].reward += reward

    def record_action(self, action: Any) -> None:
        """Record the action that the last completion caused, unless it is None."""
        if action is not None and self.turns:
            self.turns[-1].action = action

    def record_calls(self, num_calls: int, num_failed: int) -> None:
        """Add to the numbers of tool calls and failed tool calls."""
        self.num_tool_calls += num_calls
        self.num_tool_calls_failed += num_failed

    def make_transcript_turns(self) -> Iterator[TranscriptTurn]:
        """Yield the turns in the form of a transcript.

        The start of a conversation shows the system message and the tools as the policy saw them.
        """
        for turn in self.turns:
            messages = turn.messages
            if system_text := self._find_system_text(turn):
                system_message: Message = {"role": "system", "content": system_text}
                messages = [system_message, *skip_system_messages(messages)]
            yield make_transcript_turn(messages, turn.text, turn.action, turn.reward)

    @abstractmethod
    def _find_system_text(self, turn: TurnT) -> str:
        """Return the system message and the tools that the policy saw before a turn.

        Empty if there are none, or if the turn continues a conversation.
        """

    def make_sequences(self, *, include_unanswered: bool = False) -> tuple[TokenSequence, ...]:
        """Return the token sequences of the episode.

        Each sequence ends with a turn that no other turn continues. A turn can be in several
        sequences. Only the first of them trains on it, and in the others it is part of the prompt.

        Args:
            include_unanswered: append the messages after the last completion.
        """
        unanswered_ids = self._encode_unanswered() if include_unanswered else []
        trained_turns: set[Turn] = set()
        sequences = []
        for leaf in self._find_leaves():
            lineage = leaf.lineage
            untrained_turns = [turn for turn in lineage if turn not in trained_turns]
            trained_turns.update(untrained_turns)
            prefix_ids = join_tokens(lineage[: len(lineage) - len(untrained_turns)])
            suffix_ids = unanswered_ids if leaf is self.turns[-1] else ()
            sequences.append(join_turns(untrained_turns, prefix_ids, suffix_ids))
        return tuple(sequences)

    def _find_leaves(self) -> list[TurnT]:
        """Return the turns that no other turn continues, in order."""
        parents = {turn.parent for turn in self.turns}
        return [turn for turn in self.turns if turn not in parents]

    def _encode_unanswered(self) -> list[int]:
        """Return the tokens of the messages after the last completion; empty if they do not fit."""
        return []


@dataclass(eq=False)
class Conversation(EpisodeRecord[Turn]):
    """The messages of one episode, in which environment and policy alternate."""

    messages: list[Message] = field(default_factory=list, init=False)
    """All messages so far, including completions."""
    _tools: Sequence[ToolSpec] = field(default=(), init=False)
    _completion_indices: set[int] = field(default_factory=set, init=False)
    """Indices of the completions in `messages`."""
    _num_answered_messages: int = field(default=0, init=False)
    """Number of messages up to and including the last completion."""
    _pending_ids: list[int] | None = field(default=None, init=False)
    """Tokens of the messages after the last completion; None if they must be encoded again."""
    _starts_sequence: bool = field(default=True, init=False)
    """True if the next prompt does not continue the tokens of the last turn."""

    @property
    def prompt(self) -> list[Message]:
        return list(self.turns[0].messages) if self.turns else self.messages[:]

    @property
    def completion(self) -> list[Message]:
        return self.messages[len(self.prompt) : self._num_answered_messages]

    @property
    def unanswered(self) -> Sequence[Message]:
        return self.messages[self._num_answered_messages :] if self.turns else ()

    def _find_system_text(self, turn: Turn) -> str:
        is_first = turn is self.turns[0]
        return self.chat.read_system_text(turn.messages, self._tools) if is_first else ""

    def offer_tools(self, tools: Sequence[ToolSpec]) -> None:
        """List these tools in the first prompt."""
        self._tools = tools

    def add(self, messages: Sequence[Message]) -> None:
        """Show the policy these messages before its next completion."""
        self.messages += messages
        self._pending_ids = None

    @property
    def thoughts(self) -> ThoughtForm:
        """Form of the thoughts in completions."""
        return self.chat.thoughts

    @property
    def has_room(self) -> bool:
        """True while the limits allow another completion."""
        if self.num_turns >= self.limits.max_turns or self._is_surely_too_long:
            return False
        num_tokens = self._count_prompt_tokens() + self.limits.max_completion_tokens
        return num_tokens <= self.limits.max_tokens

    async def encode_long_messages(self) -> None:
        """Encode the next prompt in a thread if that takes long, so that the event loop continues.

        Raises:
            PromptError: the chat template cannot render the messages.
        """
        is_encoded = self._pending_ids is not None or self.num_turns >= self.limits.max_turns
        if is_encoded or self._is_surely_too_long:
            return
        # Without thoughts, every turn encodes the whole conversation again.
        num_chars = self._num_pending_chars
        if not self.chat.keeps_thoughts:
            num_chars = count_chars(self.messages, self._tools)
        if is_slow_to_encode(num_chars):
            await asyncio.to_thread(self._get_pending_ids)

    async def complete(self, answers: AnswerTrie | None = None) -> str:
        """Sample one completion and return its text.

        Args:
            answers: answers to which the completion is restricted; None if it is not restricted.

        Raises:
            ConversationFullError: the limits allow no further completion.
        """
        await self.encode_long_messages()
        self.refuse_if_full()
        pending_ids, parent = self._get_pending_ids(), self._parent
        prompt_ids = [*join_tokens(parent.lineage if parent else ()), *pending_ids]
        seed = mix(self.key, self.num_turns)
        restriction = () if answers is None else (answers,)
        completion = await self.generate(prompt_ids, self.sampling, seed, *restriction)
        text = self.chat.decode(completion.token_ids)
        new_messages = self.messages[self._num_answered_messages :]
        turn = Turn(pending_ids, completion, messages=new_messages, text=text, parent=parent)
        turn.is_cut = not completion.has_end_token
        self.turns.append(turn)
        self._completion_indices.add(len(self.messages))
        self.messages.append({"role": "assistant", "content": text})
        self._num_answered_messages = len(self.messages)
        self._pending_ids, self._starts_sequence = None, False
        return text

    def refuse_if_full(self) -> None:
        if self.has_room:
            return
        size = (
            f"{self._num_pending_chars} new characters"
            if self._is_surely_too_long
            else f"{self._count_prompt_tokens()} tokens"
        )
        raise ConversationFullError(
            f"the limits allow no further completion: {self.num_turns} turns of at most "
            f"rollout.max_turns = {self.limits.max_turns}, and a prompt of "
            f"{size} plus rollout.max_completion_tokens = "
            f"{self.limits.max_completion_tokens} of at most rollout.max_tokens = "
            f"{self.limits.max_tokens}; raise the limit that is too low, or end the episode as "
            "truncated"
        )

    @property
    def _num_pending_chars(self) -> int:
        """Number of characters that the next prompt adds, with the tools of the first prompt."""
        pending_messages = self.messages[self._num_answered_messages :]
        return count_chars(pending_messages, () if self.turns else self._tools)

    @property
    def _is_surely_too_long(self) -> bool:
        """True if the messages after the last completion are too long even to be encoded."""
        return is_surely_longer(self._num_pending_chars, self.limits.max_tokens)

    @property
    def _parent(self) -> Turn | None:
        """The turn that the next prompt continues, valid after `_get_pending_ids` was called."""
        return None if self._starts_sequence else self.turns[-1]

    def _count_prompt_tokens(self) -> int:
        num_pending_tokens, parent = len(self._get_pending_ids()), self._parent
        return num_pending_tokens + sum(
            len(turn.prompt_ids) + len(turn.completion.token_ids)
            for turn in (parent.lineage if parent else ())
        )

    def _encode_unanswered(self) -> list[int]:
        if len(self.messages) == self._num_answered_messages or not self.turns:
            return []
        if self._is_surely_too_long:
            return []
        # Tokens that start a new sequence do not follow the last turn, so they are left out.
        unanswered_ids = self._get_pending_ids()
        fits = self._count_prompt_tokens() <= self.limits.max_tokens
        return unanswered_ids if fits and not self._starts_sequence else []

    def _get_pending_ids(self) -> list[int]:
        if self._pending_ids is None:
            try:
                self._pending_ids = self._encode_pending_messages()
            except ConfigError as error:
                # The template renders other conversations, so the configuration is correct.
                raise PromptError(str(error)) from error
        return self._pending_ids

    def _encode_pending_messages(self) -> list[int]:
        """Return the tokens that the next prompt adds, and set `_starts_sequence`."""
        pending_messages, chat = self.messages[self._num_answered_messages :], self.chat
        if not self.turns:
            return chat.encode_first_prompt(pending_messages, self._tools)
        if chat.keeps_thoughts:
            completion = self.turns[-1].completion
            return chat.encode_next_prompt(
                pending_messages,
                has_end_token=completion.has_end_token,
                end_token_id=completion.token_ids[-1] if completion.has_end_token else None,
            )
        previous_ids = join_tokens(self.turns[-1].lineage)
        messages = [
            mark_completion(message) if index in self._completion_indices else message
            for index, message in enumerate(self.messages)
        ]
        prompt_ids = chat.encode_whole_prompt(messages, self._tools)
        self._starts_sequence = prompt_ids[: len(previous_ids)] != previous_ids
        return prompt_ids if self._starts_sequence else prompt_ids[len(previous_ids) :]

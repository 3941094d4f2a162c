"""The prompts and completions of an episode, and a conversation that records every token.

    add(messages)              messages of the environment; several calls may follow each other
    complete()                 sample one turn and return its text
    add_reward(reward)         reward of the last turn
    record_action(action)      action that the last turn caused
    record_calls(num, failed)  tool calls of the last turn

A prompt always consists of the tokens that were sent before, the tokens that were sampled, and the
tokens that were added since. If the chat template removes the reasoning of earlier turns, a prompt
may not start with the tokens that were sent before. It then starts another sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ludus.env import Message
from ludus.proto.config import RolloutConfig
from ludus.proto.errors import ConfigError, LudusError
from ludus.proto.runs import TranscriptTurn
from ludus.trainer.core.interfaces import GenerateFn
from ludus.trainer.core.streams import mix
from ludus.trainer.core.types import Sampling, TokenSequence, Turn, join_tokens, join_turns
from ludus.trainer.models.chat import ChatTokenizer, ToolSpec
from ludus.trainer.rollout.transcript import make_transcript_turn

TurnT = TypeVar("TurnT", bound=Turn)


class ConversationFullError(LudusError):
    """A limit on turns or tokens leaves no room for another completion."""


class PromptError(LudusError):
    """The chat template cannot render the messages of this conversation."""


@dataclass(eq=False)
class EpisodeRecord(ABC, Generic[TurnT]):
    """All prompts and completions of an episode."""

    generate: GenerateFn
    chat: ChatTokenizer
    limits: RolloutConfig
    sampling: Sampling
    """Settings of a completion; the limits replace its maximum number of tokens."""
    key: int
    """Key of the random numbers of the completions."""
    turns: list[TurnT] = field(default_factory=list, init=False)
    """All turns in the order of their completions."""
    num_tool_calls: int = field(default=0, init=False)
    """Number of calls of the environment's tools, including failed calls."""
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

    @abstractmethod
    def refuse_if_full(self) -> None:
        """Raise an error if the limits allow no further completion."""

    @property
    def num_branches(self) -> int:
        """Number of sequences beyond the first that branch from another sequence."""
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
        """Count tool calls and failed tool calls."""
        self.num_tool_calls += num_calls
        self.num_tool_calls_failed += num_failed

    def transcript_turns(self) -> Iterator[TranscriptTurn]:
        """Yield the turns as a transcript shows them."""
        for turn in self.turns:
            yield make_transcript_turn(turn.messages, turn.text, turn.action, turn.reward)

    def sequences(self, *, include_rest: bool = False) -> tuple[TokenSequence, ...]:
        """Return the token sequences that the policy sampled from.

        Each ends with a turn that no other turn continues. The first sequence that contains a turn
        trains on it. In the others the turn belongs to the prompt.

        Args:
            include_rest: append the messages that no completion followed.
        """
        rest_ids = self._rest_ids() if include_rest else []
        trained: set[Turn] = set()
        sequences = []
        for leaf in self._leaves():
            path = leaf.path
            new_turns = [turn for turn in path if turn not in trained]
            trained.update(new_turns)
            start_ids = join_tokens(path[: len(path) - len(new_turns)])
            sequences.append(
                join_turns(new_turns, start_ids, rest_ids if leaf is self.turns[-1] else ())
            )
        return tuple(sequences)

    def _leaves(self) -> list[TurnT]:
        """Return the turns that no other turn continues, in order."""
        parents = {turn.parent for turn in self.turns}
        return [turn for turn in self.turns if turn not in parents]

    def _rest_ids(self) -> list[int]:
        """Return the tokens of the messages after the last completion, if they fit."""
        return []


@dataclass(eq=False)
class Conversation(EpisodeRecord[Turn]):
    """The policy's side of one episode."""

    messages: list[Message] = field(default_factory=list, init=False)
    """All messages so far, including completions."""
    _tools: Sequence[ToolSpec] = field(default=(), init=False)
    _num_answered: int = field(default=0, init=False)
    """Number of messages up to and including the last completion."""
    _prompt: list[int] | None = field(default=None, init=False)
    """Tokens that the next prompt adds; None until they are needed."""
    _starts_sequence: bool = field(default=True, init=False)
    """True if `_prompt` does not continue the tokens of the last turn."""

    @property
    def prompt(self) -> list[Message]:
        return list(self.turns[0].messages) if self.turns else self.messages[:]

    @property
    def completion(self) -> list[Message]:
        return self.messages[len(self.prompt) : self._num_answered]

    def offer_tools(self, tools: Sequence[ToolSpec]) -> None:
        """List these tools in the first prompt."""
        self._tools = tools

    def add(self, messages: Sequence[Message]) -> None:
        """Show the policy these messages before its next completion."""
        self.messages += messages
        self._prompt = None

    @property
    def has_room(self) -> bool:
        """True while the limits allow another completion."""
        num_tokens = self._num_prompt_tokens() + self.limits.max_completion_tokens
        return num_tokens <= self.limits.max_tokens and self.num_turns < self.limits.max_turns

    async def complete(self) -> str:
        """Sample one completion and return its text.

        Raises:
            ConversationFullError: the limits allow no further completion.
        """
        self.refuse_if_full()
        new_ids, parent = self._new_ids(), self._parent
        prompt_ids = [*join_tokens(parent.path if parent else ()), *new_ids]
        seed = mix(self.key, self.num_turns)
        completion = await self.generate(prompt_ids, self.sampling, seed)
        text = self.chat.decode(completion.token_ids)
        messages = self.messages[self._num_answered :]
        self.turns.append(Turn(new_ids, completion, messages=messages, text=text, parent=parent))
        self.messages.append({"role": "assistant", "content": text})
        self._num_answered = len(self.messages)
        self._prompt, self._starts_sequence = None, False
        return text

    def refuse_if_full(self) -> None:
        if self.has_room:
            return
        raise ConversationFullError(
            f"the limits allow no further completion: {self.num_turns} turns of at most "
            f"rollout.max_turns = {self.limits.max_turns}, and a prompt of "
            f"{self._num_prompt_tokens()} tokens plus rollout.max_completion_tokens = "
            f"{self.limits.max_completion_tokens} of at most rollout.max_tokens = "
            f"{self.limits.max_tokens}; raise the limit that is too low, or end the episode as "
            "truncated"
        )

    @property
    def _parent(self) -> Turn | None:
        """The turn that the next prompt continues; call `_new_ids` first."""
        return None if self._starts_sequence else self.turns[-1]

    def _num_prompt_tokens(self) -> int:
        num_new, parent = len(self._new_ids()), self._parent
        return num_new + sum(
            len(turn.prompt_ids) + len(turn.completion.token_ids)
            for turn in (parent.path if parent else ())
        )

    def _rest_ids(self) -> list[int]:
        if len(self.messages) == self._num_answered or not self.turns:
            return []
        # A rest that starts a sequence follows no turn, so it cannot show the state after one.
        rest = self._new_ids()
        fits = self._num_prompt_tokens() <= self.limits.max_tokens
        return rest if fits and not self._starts_sequence else []

    def _new_ids(self) -> list[int]:
        if self._prompt is None:
            try:
                self._prompt = self._encode_pending()
            except ConfigError as error:
                # The template renders other conversations, so the configuration is not the cause.
                raise PromptError(str(error)) from error
        return self._prompt

    def _encode_pending(self) -> list[int]:
        """Encode the messages after the last completion; decide whether they start a sequence."""
        pending, chat = self.messages[self._num_answered :], self.chat
        if not self.turns:
            return chat.encode_first_prompt(pending, self._tools)
        if chat.keeps_thoughts:
            return chat.encode_next_prompt(pending, ended=self.turns[-1].completion.has_end_token)
        token_ids = join_tokens(self.turns[-1].path)
        prompt = chat.encode_whole_prompt(self.messages, self._tools)
        self._starts_sequence = prompt[: len(token_ids)] != token_ids
        return prompt if self._starts_sequence else prompt[len(token_ids) :]

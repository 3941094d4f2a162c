"""A conversation with the policy, which records every token.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ludus.env import Message
from ludus.proto.config import RolloutConfig
from ludus.proto.errors import ConfigError, LudusError
from ludus.trainer.core.interfaces import GenerateFn
from ludus.trainer.core.streams import mix
from ludus.trainer.core.types import Sampling, TokenSequence, Turn, join_turns
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.template import ToolSpec


class ConversationFullError(LudusError):
    """A limit on turns or tokens leaves no room for another completion."""


class PromptError(LudusError):
    """The chat template cannot render the messages of this conversation."""


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """One turn of an episode in readable form."""

    messages: Sequence[Message]
    """New messages that the policy saw before this turn."""
    text: str
    """Text of the completion."""
    action: Any
    """Action that the completion caused; None if it caused none."""
    reward: float


class TurnHistory(Protocol):
    """The turns of an episode in readable form."""

    @property
    def num_turns(self) -> int:
        """Number of turns so far."""

    def played_turns(self) -> Iterator[PlayedTurn]:
        """Yield the turns in order."""


class EpisodeRecord(TurnHistory, Protocol):
    """All prompts and completions of an episode."""

    num_tool_calls: int
    """Number of calls of the environment's tools, including failed calls."""
    num_tool_calls_failed: int

    @property
    def num_branches(self) -> int:
        """Number of sequences beyond the first that branch from another sequence."""

    @property
    def turns(self) -> list[Turn]:
        """All turns in order."""

    @property
    def prompt(self) -> list[Message]:
        """The messages before the first completion."""

    @property
    def completion(self) -> list[Message]:
        """The messages from the first completion to the last one."""

    def refuse_if_full(self) -> None:
        """Raise an error if the limits allow no further completion."""

    def sequences(self, *, include_rest: bool) -> tuple[TokenSequence, ...]:
        """Return the token sequences that the policy sampled from.

        Args:
            include_rest: append the messages that no completion followed.
        """


@dataclass(slots=True)
class GrowingSequence:
    """Turns that continue each other."""

    turns: list[Turn] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """All tokens that were sent or sampled."""


class Conversation:
    """The policy's side of one episode."""

    def __init__(
        self,
        generate: GenerateFn,
        chat: ChatTokenizer,
        limits: RolloutConfig,
        sampling: Sampling,
        key: int,
    ) -> None:
        """Start an empty conversation; `key` determines the random numbers of its turns."""
        self._generate = generate
        self._chat = chat
        self._limits = limits
        self._sampling = replace(sampling, max_tokens=limits.max_completion_tokens)
        self._key = key
        self._tools: Sequence[ToolSpec] = ()
        self._sequences = [GrowingSequence()]
        self._pending: list[Message] = []
        """Messages that no completion has followed yet."""
        self._prompt: list[int] | None = None
        """Tokens of the pending messages; None until they are needed."""
        self.messages: list[Message] = []
        """All messages so far, including completions."""
        self._completion_indices: list[int] = []
        """Index in `messages` of each completion."""
        self._actions: dict[int, Any] = {}
        """Action that a completion caused, by the completion's index in `messages`."""
        self.num_tool_calls = 0
        """Number of tool calls, including failed calls."""
        self.num_tool_calls_failed = 0

    @property
    def num_turns(self) -> int:
        """Number of turns so far."""
        return len(self._completion_indices)

    def offer_tools(self, tools: Sequence[ToolSpec]) -> None:
        """List these tools in the first prompt."""
        self._tools = tools

    def add(self, messages: Sequence[Message]) -> None:
        """Show the policy these messages before its next completion."""
        self._pending += messages
        self.messages += messages
        self._prompt = None

    @property
    def has_room(self) -> bool:
        """True while the limits allow another completion."""
        prompt = self._prompt_ids()
        num_tokens = len(self._sequences[-1].token_ids) + len(prompt)
        fits = num_tokens + self._limits.max_completion_tokens <= self._limits.max_tokens
        return fits and self.num_turns < self._limits.max_turns

    async def complete(self) -> str:
        """Sample one completion and return its text.

        Raises:
            ConversationFullError: the limits allow no further completion.
        """
        self.refuse_if_full()
        prompt, sequence = self._prompt_ids(), self._sequences[-1]
        ids = [*sequence.token_ids, *prompt]
        completion = await self._generate(ids, self._sampling, mix(self._key, self.num_turns))
        text = self._chat.decode(completion.token_ids)
        sequence.turns.append(Turn(prompt, completion))
        sequence.token_ids = [*ids, *completion.token_ids]
        self._completion_indices.append(len(self.messages))
        self.messages.append({"role": "assistant", "content": text})
        self._pending, self._prompt = [], None
        return text

    def refuse_if_full(self) -> None:
        """Raise ConversationFullError if the limits allow no further completion."""
        if self.has_room:
            return
        num_tokens = len(self._sequences[-1].token_ids) + len(self._prompt_ids())
        raise ConversationFullError(
            f"the limits allow no further completion: {self.num_turns} turns of at most "
            f"rollout.max_turns = {self._limits.max_turns}, and a prompt of {num_tokens} tokens "
            f"plus rollout.max_completion_tokens = {self._limits.max_completion_tokens} of at most "
            f"rollout.max_tokens = {self._limits.max_tokens}; raise the limit that is too low, or "
            "end the episode as truncated"
        )

    def add_reward(self, reward: float) -> None:
        """Add to the reward of the last turn."""
        turns = next((s.turns for s in reversed(self._sequences) if s.turns), None)
        if turns is None:
            raise ValueError(f"a reward ({reward:g}) needs a completion first; call complete")
        turns[-1] = replace(turns[-1], reward=turns[-1].reward + reward)

    def record_action(self, action: Any) -> None:
        """Record the action that the last completion caused, unless it is None."""
        if action is not None and self._completion_indices:
            self._actions[self._completion_indices[-1]] = action

    def record_calls(self, num_calls: int, num_failed: int) -> None:
        """Count tool calls and failed tool calls."""
        self.num_tool_calls += num_calls
        self.num_tool_calls_failed += num_failed

    @property
    def num_branches(self) -> int:
        """Always 0: each turn continues the previous one."""
        return 0

    @property
    def turns(self) -> list[Turn]:
        """All turns in order."""
        return [turn for sequence in self._sequences for turn in sequence.turns]

    @property
    def prompt(self) -> list[Message]:
        """The messages before the first completion."""
        return self.messages[: self._completion_indices[0]] if self.num_turns else self.messages[:]

    @property
    def completion(self) -> list[Message]:
        """The messages from the first completion to the last one."""
        indices = self._completion_indices
        return self.messages[indices[0] : indices[-1] + 1] if indices else []

    def played_turns(self) -> Iterator[PlayedTurn]:
        """Yield the turns in order."""
        start = 0
        for turn, index in zip(self.turns, self._completion_indices, strict=True):
            text = self.messages[index]["content"]
            messages, action = self.messages[start:index], self._actions.get(index)
            yield PlayedTurn(messages, text, action, turn.reward)
            start = index + 1

    def sequences(self, *, include_rest: bool) -> tuple[TokenSequence, ...]:
        """Return the token sequences that the policy sampled from.

        Args:
            include_rest: append the pending messages to the last sequence if they fit; they show
                the state in which a truncated episode ended.
        """
        rest = self._rest_ids() if include_rest else []
        sequences = [sequence for sequence in self._sequences if sequence.turns]
        results = [join_turns(sequence.turns) for sequence in sequences]
        for sequence, tokens in zip(sequences, results, strict=True):
            if sequence.token_ids != tokens.token_ids.tolist():
                raise RuntimeError(
                    "the tokens of a conversation differ from the tokens of its turns; the "
                    "generate function must not change the prompt that it receives"
                )
        if rest:
            results[-1] = join_turns(sequences[-1].turns, rest)
        return tuple(results)

    @property
    def _has_pending(self) -> bool:
        return bool(self._pending)

    def _rest_ids(self) -> list[int]:
        if not self._has_pending or not self.num_turns:
            return []
        rest = self._prompt_ids()
        tail = self._sequences[-1]
        fits = len(tail.token_ids) + len(rest) <= self._limits.max_tokens
        # A sequence that was started for the rest alone has no turn that the rest could follow.
        return rest if tail.turns and fits else []

    def _prompt_ids(self) -> list[int]:
        """Return the tokens that the next prompt adds; start a new sequence if necessary."""
        if self._prompt is None:
            try:
                self._prompt = self._encode_pending()
            except ConfigError as error:
                # The template renders other conversations, so the configuration is not the cause.
                raise PromptError(str(error)) from error
        return self._prompt

    def _encode_pending(self) -> list[int]:
        tail, chat = self._sequences[-1], self._chat
        if not self.num_turns:
            return chat.first_prompt(self._pending, self._tools)
        if chat.keeps_thoughts:
            return chat.next_prompt(self._pending, ended=tail.turns[-1].completion.has_end_token)
        if not tail.turns:  # an earlier check of the room started this sequence
            self._sequences.pop()
            tail = self._sequences[-1]
        prompt = chat.whole_prompt(self.messages, self._tools)
        if prompt[: len(tail.token_ids)] == tail.token_ids:
            return prompt[len(tail.token_ids) :]
        self._sequences.append(GrowingSequence())
        return prompt

"""One conversation with the policy: messages go in, text comes out, tokens are kept.

    add(messages)   what the environment says; may be called several times in a row
    answer()        what the policy says; one turn
    add_reward(r)   what the last turn has earned
    add_tokens(ids), answer_tokens(), earn(rewards)
                    the same token by token, past the chat template
    acted(action)   what it made the environment do
    called(n, f)    how many tools it called, and how many of these calls failed

The tokens that are sent are always those sent before, those sampled, and those added since.
Where thoughts of earlier turns are taken out, a prompt may not begin with what was sent
before: it then begins another sequence.
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
    """No room for another answer: a limit on turns or tokens is reached."""


class PromptError(LudusError):
    """The chat template refuses what the conversation has come to."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """An answer of the policy, and what came before and of it; for people to read."""

    shown: Sequence[Message]
    """What it was shown since the answer before."""
    answer: str
    action: Any
    """What it made the environment do; None is nothing."""
    reward: float


class Readable(Protocol):
    """What was said in an episode, for people to read."""

    @property
    def num_turns(self) -> int:
        """Answers so far."""

    def exchanges(self) -> Iterator[Exchanged]:
        """The answers, in order."""


class Record(Readable, Protocol):
    """What an episode keeps of all that the policy was asked and has said."""

    num_tool_calls: int
    """Of the environment; the failed ones included."""
    num_tool_calls_failed: int

    @property
    def num_branches(self) -> int:
        """Sequences that begin where another one went on."""

    @property
    def turns(self) -> list[Turn]:
        """All answers, in order."""

    @property
    def prompt(self) -> list[Message]:
        """The messages before the first answer."""

    @property
    def completion(self) -> list[Message]:
        """The first answer and all that follows, up to the last answer."""

    def refuse_if_full(self) -> None:
        """Raise where the limits allow no other answer."""

    def sequences(self, *, with_rest: bool) -> tuple[TokenSequence, ...]:
        """What the policy has sampled from, token by token."""


@dataclass(slots=True)
class _Growing:
    """Turns that continue each other."""

    turns: list[Turn] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Everything that was sent and sampled."""


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
        """`key` decides what is sampled, turn by turn."""
        self._generate = generate
        self._chat = chat
        self._limits = limits
        self._sampling = replace(sampling, max_tokens=limits.max_completion_tokens)
        self._key = key
        self._tools: Sequence[ToolSpec] = ()
        self._sequences = [_Growing()]
        self._waiting: list[Message] = []
        self._waiting_ids: list[int] | None = None
        """Tokens that were added as such, which then are the next prompt."""
        self._prompt: list[int] | None = None
        """Tokens of the waiting messages, once somebody asked."""
        self.num_turns = 0
        self.messages: list[Message] = []
        """All so far, the policy's own included."""
        self.answered: list[int] = []
        """The places of the policy's own, one per turn."""
        self.actions: dict[int, Any] = {}
        """What its answers made the environment do, by their places; for people to read."""
        self.num_tool_calls = 0
        """The failed ones included."""
        self.num_tool_calls_failed = 0

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        """List these tools in the first prompt."""
        self._tools = tools

    def add(self, messages: Sequence[Message]) -> None:
        """Show the policy these messages before its next answer."""
        self._waiting += messages
        self.messages += messages
        self._prompt = None

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Show the policy these tokens as they are, none of them the chat template's.

        Raises:
            ValueError: messages wait to be shown, whose tokens the template makes.
        """
        if self._waiting:
            raise ValueError(
                "expected a conversation in tokens alone, got tokens after messages that wait to "
                "be answered; call answer first"
            )
        self._waiting_ids = [*(self._waiting_ids or ()), *token_ids]
        self._prompt = None
        if token_ids:
            text = self._chat.decode(list(token_ids))
            self.messages.append({"role": "user", "content": text})

    @property
    def has_room(self) -> bool:
        """True while the limits allow another answer."""
        prompt = self._prompt_ids()
        num_tokens = len(self._sequences[-1].token_ids) + len(prompt)
        fits = num_tokens + self._limits.max_completion_tokens <= self._limits.max_tokens
        return fits and self.num_turns < self._limits.max_turns

    async def answer(self) -> str:
        """What the policy says now.

        Raises:
            ConversationFullError: the limits allow no other answer.
        """
        await self.answer_tokens()
        return self.messages[-1]["content"]

    async def answer_tokens(self) -> list[int]:
        """What the policy says now, as it was sampled.

        Raises:
            ConversationFullError: the limits allow no other answer.
        """
        self.refuse_if_full()
        prompt, sequence = self._prompt_ids(), self._sequences[-1]
        sent = [*sequence.token_ids, *prompt]
        completion = await self._generate(sent, self._sampling, mix(self._key, self.num_turns))
        text = self._chat.decode(completion.token_ids)
        sequence.turns.append(Turn(prompt, completion))
        sequence.token_ids = [*sent, *completion.token_ids]
        self.num_turns += 1
        self.answered.append(len(self.messages))
        self.messages.append({"role": "assistant", "content": text})
        self._waiting, self._waiting_ids, self._prompt = [], None, None
        return list(completion.token_ids)

    def refuse_if_full(self) -> None:
        """Raise ConversationFullError where the limits allow no other answer."""
        if self.has_room:
            return
        num_tokens = len(self._sequences[-1].token_ids) + len(self._prompt_ids())
        raise ConversationFullError(
            f"expected fewer than rollout.max_turns = {self._limits.max_turns} turns, got "
            f"{self.num_turns}, and room for an answer of rollout.max_completion_tokens = "
            f"{self._limits.max_completion_tokens} after a prompt of {num_tokens} tokens, got "
            f"rollout.max_tokens = {self._limits.max_tokens}; raise what is too low, or end the "
            "episode as truncated"
        )

    def add_reward(self, reward: float) -> None:
        """Add what the last turn has earned."""
        turns = next((s.turns for s in reversed(self._sequences) if s.turns), None)
        if turns is None:
            raise ValueError(f"expected an answer before it earns {reward:g}, got none yet")
        turns[-1] = replace(turns[-1], reward=turns[-1].reward + reward)

    def earn(self, rewards: Sequence[float]) -> None:
        """Keep as many tokens of the last answer as there are rewards, each with its own.

        The tokens that are left out were never played: nothing is to be learned from them.
        """
        sequence = self._sequences[-1]
        answer = sequence.turns[-1] if sequence.turns else None
        if answer is None or not 1 <= len(rewards) <= len(answer.completion.token_ids):
            raise ValueError(
                f"expected rewards for the first tokens of an answer, got {len(rewards)}"
            )
        completion = answer.completion
        num_left_out = len(completion.token_ids) - len(rewards)
        if num_left_out:
            del sequence.token_ids[-num_left_out:]
            completion = replace(
                completion,
                token_ids=completion.token_ids[: len(rewards)],
                logprobs=completion.logprobs[: len(rewards)],
                has_end_token=False,
            )
            self.messages[self.answered[-1]]["content"] = self._chat.decode(completion.token_ids)
        sequence.turns[-1] = replace(
            answer, completion=completion, reward=sum(rewards), token_rewards=tuple(rewards)
        )

    def acted(self, action: Any) -> None:
        """Note what the last answer made the environment do; None is nothing."""
        if action is not None and self.answered:
            self.actions[self.answered[-1]] = action

    def called(self, num_calls: int, num_failed: int) -> None:
        """Count calls of tools, of which some failed."""
        self.num_tool_calls += num_calls
        self.num_tool_calls_failed += num_failed

    @property
    def num_branches(self) -> int:
        """None: what is said in turns branches nowhere."""
        return 0

    @property
    def turns(self) -> list[Turn]:
        """All turns, in order."""
        return [turn for sequence in self._sequences for turn in sequence.turns]

    @property
    def prompt(self) -> list[Message]:
        """The messages before the first answer."""
        return self.messages[: self.answered[0]] if self.answered else list(self.messages)

    @property
    def completion(self) -> list[Message]:
        """The first answer and all that follows, up to the last answer."""
        return self.messages[self.answered[0] : self.answered[-1] + 1] if self.answered else []

    def exchanges(self) -> Iterator[Exchanged]:
        """The answers with what was said before each."""
        begin = 0
        for turn, place in zip(self.turns, self.answered, strict=True):
            answer = self.messages[place]["content"]
            shown, action = self.messages[begin:place], self.actions.get(place)
            yield Exchanged(shown, answer, action, turn.reward)
            begin = place + 1

    def sequences(self, *, with_rest: bool) -> tuple[TokenSequence, ...]:
        """What the policy has sampled from, token by token.

        Args:
            with_rest: the last sequence ends with the messages that were not answered, where
                they fit: the state in which a truncated episode was left.
        """
        rest = self._rest() if with_rest else []
        finished = [sequence for sequence in self._sequences if sequence.turns]
        joined = [join_turns(sequence.turns) for sequence in finished]
        for sequence, tokens in zip(finished, joined, strict=True):
            if sequence.token_ids != tokens.token_ids.tolist():
                raise RuntimeError(
                    "expected every prompt to begin with the tokens before it, got a conversation "
                    "that is not the sum of its turns; a generator must not change its prompt"
                )
        if rest:
            joined[-1] = join_turns(finished[-1].turns, rest)
        return tuple(joined)

    def _rest(self) -> list[int]:
        if not (self._waiting or self._waiting_ids) or not self.num_turns:
            return []
        rest = self._prompt_ids()
        last = self._sequences[-1]
        fits = len(last.token_ids) + len(rest) <= self._limits.max_tokens
        # A sequence that was begun again for the rest alone has no turn to follow.
        return rest if last.turns and fits else []

    def _prompt_ids(self) -> list[int]:
        """The tokens that the next prompt adds; a new sequence begins where it has to."""
        if self._prompt is None:
            try:
                self._prompt = self._encoded()
            except ConfigError as error:
                # Other conversations go well: it is this one that the template does not take.
                raise PromptError(str(error)) from error
        return self._prompt

    def _encoded(self) -> list[int]:
        if self._waiting_ids is not None:
            return self._waiting_ids
        last, chat = self._sequences[-1], self._chat
        if not self.num_turns:
            return chat.first_prompt(self._waiting, self._tools)
        if chat.keeps_thoughts:
            return chat.next_prompt(self._waiting, ended=last.turns[-1].completion.has_end_token)
        if not last.turns:  # begun again when somebody asked for room
            self._sequences.pop()
            last = self._sequences[-1]
        whole = chat.whole_prompt(self.messages, self._tools)
        if whole[: len(last.token_ids)] == last.token_ids:
            return whole[len(last.token_ids) :]
        self._sequences.append(_Growing())
        return whole

"""The tokens of an agent's episode, as a tree of prompts (p) and sampled completions (s).

           +-- s1 --+-- s2 --+-- s4     p s1 p s2 p s4    trains on s1, s2 and s4
    p -----+        |        +-- s5     p s1 p s2 p s5    trains on s5
           |        +-- s3              p s1 p s3         trains on s3
           +-- s6                       p s6              (a retry, or the second of n = 2)

An agent sends its whole history with each request. If a message has the text and calls of an
earlier completion, it is replaced by the tokens that were sampled for it. A history that only grows
therefore continues the exact tokens of the previous completion. Other requests branch off at the
last completion that they share with an earlier one, or start at the root. Examples are an edited or
shortened history, a retry, parallel requests, and a chat template that removes reasoning. All other
messages are encoded by the chat template and never trained on.

Each sampled token is trained on once, in the first sequence that contains it.

    text      <think> ... </think> Let me look. <tool_call>...</tool_call> STOP and more
    response  reasoning            content       calls
    kept      ------------------------------------------------------------>

Engines do not support stop texts, so a completion is cut after it was sampled. The tokens after the
cut are dropped, because the agent never sees them and training on them would add noise. The tokens
of the stop text itself are kept like an EOS token, because they ended the completion.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NoReturn
from zlib import crc32

import numpy as np

from ludus.env import Message
from ludus.env.text.unicode import format_json
from ludus.proto.errors import ActionParseError, ConfigError
from ludus.trainer.core.streams import mix
from ludus.trainer.core.types import SampledCompletion, Turn, join_tokens
from ludus.trainer.models.chat import (
    ChatTokenizer,
    count_chars,
    is_slow_to_encode,
    is_surely_longer,
    limit_body_bytes,
)
from ludus.trainer.models.messages import mark_completion, name_results
from ludus.trainer.models.thoughts import THINK, ThoughtForm
from ludus.trainer.models.tool_calls import HERMES, CallForm, ToolSpec
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ApiError,
    ChatMessage,
    FunctionCall,
    LimitError,
    MessageKey,
    PolicyRequest,
    PolicyResponse,
)
from ludus.trainer.rollout.conversation import EpisodeRecord

_CHARS_PER_MESSAGE = 400
"""Number of characters that are encoded in the time in which a message is rendered."""


@dataclass(slots=True, eq=False, kw_only=True)
class AgentTurn(Turn):
    """A completion, with its request and response."""

    request: PolicyRequest
    response: PolicyResponse


@dataclass(eq=False)
class ConversationTree(EpisodeRecord[AgentTurn]):
    """The requests and responses of an agent's episode.

    The completion of a prompt does not depend on the order in which prompts arrive.
    """

    refusal: str = field(default="", init=False)
    """Error message of the last request that a limit refused; empty if there is none."""
    _turns_by_key: dict[MessageKey, list[AgentTurn]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )
    _num_requested_by_prompt: Counter[int] = field(default_factory=Counter, init=False)
    """Number of completions requested so far for each prompt, by the prompt's hash."""
    _num_started_completions: int = field(default=0, init=False)
    """Number of finished completions and of completions that are being sampled."""
    _num_sampled_tokens: int = field(default=0, init=False)
    """Number of tokens of all completions."""
    _thread_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Lock of the thread that encodes long prompts."""

    async def respond(self, request: PolicyRequest) -> list[PolicyResponse]:
        """Return [request.num_completions] responses, and record their completions as turns.

        Raises:
            LimitError: the run's limits do not allow the completions.
            ApiError: the chat template cannot render the messages.
        """
        limit = self.limits.max_completion_tokens
        max_tokens = min(request.max_tokens or limit, limit)
        self._check_num_turns(request)
        num_chars = self._check_num_chars(request)
        if is_slow_to_encode(num_chars + _CHARS_PER_MESSAGE * len(request.messages)):
            prompt_ids = await self._encode_in_thread(request, num_chars)
            self._check_num_turns(request)
        else:
            prompt_ids = self._encode_prompt(request)
        self._check_num_tokens(len(prompt_ids), max_tokens)
        self._num_started_completions += request.num_completions
        sampling = replace(self.sampling, max_tokens=max_tokens)
        seeds, parent = self._make_seeds(request, prompt_ids), self._find_parent(prompt_ids)
        try:
            calls = [self.generate(prompt_ids, sampling, seed) for seed in seeds]
            completions = await asyncio.gather(*calls)
        except BaseException:
            self._num_started_completions -= request.num_completions
            raise
        return [
            self._add_turn(parent, request, prompt_ids, completion) for completion in completions
        ]

    def check_body_size(self, num_bytes: int) -> None:
        # A history also repeats completions whose reasoning is not part of the prompt.
        num_tokens = self.limits.max_tokens + self._num_sampled_tokens
        if num_bytes > limit_body_bytes(num_tokens):
            self._refuse_length(f"a body of {num_bytes} bytes")

    @property
    def num_branches(self) -> int:
        return max(0, len(self._find_leaves()) - 1)

    @property
    def last_text(self) -> str:
        """Content of the last response, without reasoning and calls."""
        return self.turns[-1].response.content if self.turns else ""

    @property
    def prompt(self) -> list[Message]:
        """The messages of the last request up to its first completion."""
        messages = self._last_messages
        return messages[: _find_first_completion(messages)]

    @property
    def completion(self) -> list[Message]:
        """The last request's messages from its first completion on, and the last completion."""
        messages = self._last_messages
        return messages[_find_first_completion(messages) :]

    def refuse_if_full(self) -> None:
        """Raise LimitError if a limit has refused a request."""
        if self.refusal:
            raise LimitError(self.refusal)

    async def _encode_in_thread(self, request: PolicyRequest, num_chars: int) -> list[int]:
        """Return the tokens of a prompt. An episode encodes one long prompt at a time.

        If the request is cancelled, the next prompt waits until the thread has ended.
        """
        await self._thread_lock.acquire()
        thread_result = asyncio.get_running_loop().run_in_executor(
            None, self._encode_long_prompt, request, num_chars
        )
        thread_result.add_done_callback(lambda _: self._thread_lock.release())
        return await asyncio.shield(thread_result)

    def _encode_long_prompt(self, request: PolicyRequest, num_chars: int) -> list[int]:
        """Return the tokens of a prompt; refuse a prompt that is too long after its first part."""
        tools_json = format_json(request.tools)
        message_texts = map(self._list_prompt_texts, request.messages)
        texts = chain([tools_json], chain.from_iterable(message_texts))
        if self.chat.is_surely_longer(texts, num_chars, self.limits.max_tokens):
            self._refuse_length(f"a prompt of {num_chars} characters")
        return self._encode_prompt(request)

    def _list_prompt_texts(self, message: ChatMessage) -> Iterable[str]:
        """Return the texts of a message that become part of the prompt."""
        if message.role == "assistant" and not self.chat.keeps_thoughts:
            return map(self.chat.thoughts.get_answer, message.unparsed_texts)
        return message.unparsed_texts

    def _encode_prompt(self, request: PolicyRequest) -> list[int]:
        try:
            if self.chat.keeps_thoughts:
                return self._encode_in_pieces(request)
            messages = self._make_structured_messages(request)
            whole_messages = [
                self._restore_reasoning(message, structured_message)
                for message, structured_message in zip(request.messages, messages, strict=True)
            ]
            return self.chat.encode_whole_prompt(whole_messages, request.tools)
        except ConfigError as error:
            raise ApiError(str(error), param="messages") from error

    def _encode_in_pieces(self, request: PolicyRequest) -> list[int]:
        """Return the tokens of the messages; repeated completions keep their sampled tokens."""
        structured_messages = self._make_structured_messages(request)
        token_ids: list[int] = []
        completion: SampledCompletion | None = None
        start = 0
        for index, message in enumerate(request.messages):
            if index == 0 or message.role != "assistant" or message.key not in self._turns_by_key:
                continue
            prompt_ids = self._encode_piece(request, structured_messages[start:index], completion)
            token_ids += prompt_ids
            completion = self._find_completion(message, token_ids)
            token_ids += completion.token_ids
            start = index + 1
        return token_ids + self._encode_piece(request, structured_messages[start:], completion)

    def _make_structured_messages(self, request: PolicyRequest) -> list[Message]:
        """Return the messages with calls and their results in separate fields."""
        messages = []
        for message in request.messages:
            turns = self._turns_by_key.get(message.key) if message.role == "assistant" else None
            # The calls of a completion have the ids that the model gave them.
            original = turns[-1].response.chat_message if turns else message
            messages.append(original.structured_message)
        return name_results(messages)

    def _encode_piece(
        self,
        request: PolicyRequest,
        messages: Sequence[Message],
        completion: SampledCompletion | None,
    ) -> list[int]:
        """Return the tokens of the messages after a completion, or at the start if it is None."""
        if completion is None:
            return self.chat.encode_first_prompt(messages, request.tools)
        return self.chat.encode_next_prompt(
            messages,
            has_end_token=completion.has_end_token,
            end_token_id=completion.token_ids[-1] if completion.has_end_token else None,
        )

    def _find_completion(self, message: ChatMessage, prompt_ids: list[int]) -> SampledCompletion:
        """Return the sampled completion that a message repeats.

        If several completions have the same text, one that followed this prompt is preferred.
        """
        turns = self._turns_by_key[message.key]
        for turn in turns:
            if [*join_tokens(turn.lineage[:-1]), *turn.prompt_ids] == prompt_ids:
                return turn.completion
        return turns[-1].completion

    def _restore_reasoning(self, message: ChatMessage, structured_message: Message) -> Message:
        """Return the message for the chat template; add the reasoning of a repeated completion."""
        turns = self._turns_by_key.get(message.key) if message.role == "assistant" else None
        if not turns:
            return structured_message
        return mark_completion({"role": "assistant", "content": turns[-1].text})

    def _find_parent(self, prompt_ids: list[int]) -> AgentTurn | None:
        """Return the turn that the prompt continues and that leaves the fewest new tokens."""
        parent: AgentTurn | None = None
        end_by_turn: dict[Turn | None, int] = {None: 0}
        """Number of prompt tokens up to the end of each turn that the prompt contains."""
        for turn in self.turns:
            start = end_by_turn.get(turn.parent)
            token_ids = [*turn.prompt_ids, *turn.completion.token_ids]
            if start is not None and prompt_ids[start : start + len(token_ids)] == token_ids:
                end_by_turn[turn] = start + len(token_ids)
                if end_by_turn[turn] > end_by_turn[parent]:
                    parent = turn
        return parent

    def _make_seeds(self, request: PolicyRequest, prompt_ids: list[int]) -> list[int]:
        prompt_hash = crc32(np.array(prompt_ids, dtype=np.int32).tobytes())
        indices = range(request.num_completions)
        if request.seed is not None:
            return [mix(self.key, prompt_hash, request.seed, index) for index in indices]
        num_earlier = self._num_requested_by_prompt[prompt_hash]
        self._num_requested_by_prompt[prompt_hash] += request.num_completions
        return [mix(self.key, prompt_hash, num_earlier + index) for index in indices]

    def _add_turn(
        self,
        parent: AgentTurn | None,
        request: PolicyRequest,
        prompt_ids: list[int],
        completion: SampledCompletion,
    ) -> PolicyResponse:
        """Record a completion, cut as its request demands, and return its response."""
        text = self.chat.decode(completion.token_ids)
        chat = self.chat
        text_end, kept_end = _find_cut(text, request, chat.thoughts, chat.call_form)
        is_cut = text_end < len(text)
        if is_cut:
            completion = _take_first_tokens(chat, completion, text[:kept_end])
            text = text[:text_end]
        response = parse_response(
            text, request.tools, thoughts=chat.thoughts, call_form=chat.call_form
        )
        exceeds_limit = not completion.has_end_token and not is_cut
        if request.is_limited_to_one_call:
            response = replace(response, calls=response.calls[:1])
        if exceeds_limit and not response.calls:
            response = replace(response, finish_reason="length")
        response = replace(
            response,
            num_prompt_tokens=len(prompt_ids),
            num_tokens=len(completion.token_ids),
            tokens=self._list_tokens(completion) if request.needs_logprobs else (),
        )
        num_shared_tokens = len(join_tokens(parent.lineage)) if parent else 0
        num_shared_messages = len(parent.request.messages) + 1 if parent else 0
        turn = AgentTurn(
            prompt_ids[num_shared_tokens:],
            completion,
            messages=_make_template_messages(request.messages[num_shared_messages:]),
            text=text,
            parent=parent,
            request=request,
            response=response,
            is_cut=exceeds_limit,
        )
        self.turns.append(turn)
        self._num_sampled_tokens += len(completion.token_ids)
        self._turns_by_key[response.chat_message.key].append(turn)
        return response

    def _find_system_text(self, turn: AgentTurn) -> str:
        is_first = turn.parent is None
        return self.chat.read_system_text(turn.messages, turn.request.tools) if is_first else ""

    def _list_tokens(self, completion: SampledCompletion) -> list[tuple[str, float]]:
        token_texts = [self.chat.decode([token_id]) for token_id in completion.token_ids]
        return list(zip(token_texts, completion.logprobs, strict=True))

    def _check_num_turns(self, request: PolicyRequest) -> None:
        limits = self.limits
        if self._num_started_completions + request.num_completions > limits.max_turns:
            self.refusal = (
                f"expected at most rollout.max_turns = {limits.max_turns} completions in an "
                f"episode, got {self._num_started_completions} and a request for "
                f"{request.num_completions} more"
            )
            raise LimitError(
                self.refusal, status=403, error_type="episode_limit", code="max_turns_reached"
            )

    def _check_num_chars(self, request: PolicyRequest) -> int:
        """Return the number of characters; refuse a prompt that is too long even to be encoded."""
        num_messages, max_tokens = len(request.messages), self.limits.max_tokens
        if num_messages > max_tokens:  # a message has at least one token of the template
            self._refuse_length(f"{num_messages} messages")
        num_chars = sum(
            len(text) for message in request.messages for text in message.unparsed_texts
        )
        num_chars += count_chars((), request.tools)
        if is_surely_longer(num_chars, max_tokens):
            self._refuse_length(f"a prompt of {num_chars} characters")
        return num_chars

    def _check_num_tokens(self, prompt_length: int, max_tokens: int) -> None:
        if prompt_length + max_tokens > self.limits.max_tokens:
            self._refuse_length(f"{prompt_length} and {max_tokens}")

    def _refuse_length(self, size: str) -> NoReturn:
        self.refusal = (
            f"expected at most rollout.max_tokens = {self.limits.max_tokens} tokens of prompt and "
            f"completion, got {size}"
        )
        raise LimitError(self.refusal, param="messages", code="context_length_exceeded")

    @property
    def _last_messages(self) -> list[Message]:
        if not self.turns:
            return []
        turn = self.turns[-1]
        completion: Message = {"role": "assistant", "content": turn.text}
        return [*_make_template_messages(turn.request.messages), completion]


def _make_template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    return [message.template_message for message in messages]


def _find_first_completion(messages: Sequence[Message]) -> int:
    roles = [message["role"] for message in messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def parse_response(
    text: str,
    tools: Sequence[ToolSpec],
    *,
    thoughts: ThoughtForm = THINK,
    call_form: CallForm = HERMES,
) -> PolicyResponse:
    """Return the response with a text, split into reasoning, content and calls."""
    reasoning, content = thoughts.split(text)
    try:
        calls = call_form.read_calls(content, tools) if tools else []
    except ActionParseError:
        # The agent receives an invalid call as text.
        calls = []
    if not calls:
        return PolicyResponse(content, reasoning)
    function_calls = tuple(
        FunctionCall(call.name, format_json(call.arguments), call.id) for call in calls
    )
    content = call_form.remove_calls(content)
    return PolicyResponse(content, reasoning, function_calls, "tool_calls")


def _find_cut(
    text: str, request: PolicyRequest, thoughts: ThoughtForm, call_form: CallForm
) -> tuple[int, int]:
    """Return the end of the text in the response, and the end of the text that is trained on."""
    start = thoughts.find_end(text)
    cuts = [
        (index, index + len(stop_text))
        for stop_text in request.stop_texts
        if (index := text.find(stop_text, start)) >= 0
    ]
    if request.is_limited_to_one_call and request.tools:
        end = call_form.find_call_end(text[start:])
        if end is not None:
            cuts.append((start + end, start + end))
    return min(cuts, default=(len(text), len(text)))


def _take_first_tokens(
    chat: ChatTokenizer, completion: SampledCompletion, text: str
) -> SampledCompletion:
    """Return the completion cut to the fewest tokens whose text starts with `text`."""
    token_ids = completion.token_ids
    num_kept = bisect_left(
        range(len(token_ids)),
        len(text),
        key=lambda num_tokens: len(chat.decode(token_ids[:num_tokens])),
    )
    while num_kept < len(token_ids) and not chat.decode(token_ids[:num_kept]).startswith(text):
        num_kept += 1
    return replace(
        completion,
        token_ids=token_ids[:num_kept],
        logprobs=completion.logprobs[:num_kept],
        has_end_token=False,
    )

"""Conversations as arrays of tokens: encoding, the split for validation, and batches.

    ChatExample --chat template--> sequences: prompt | response | prompt | response | ...
                                   trained:   no       yes        no       yes

The tokens are those of a rollout in which the policy samples the responses (`models/chat.py`). The
token that ends a response is trained on too. A conversation is one sequence, unless the template
rewrites earlier turns (`keep_thinking = false`).

Shapes: N = conversations, S = sequences.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, takewhile

import numpy as np

from ludus.env import Message
from ludus.proto.config import SftData
from ludus.proto.errors import ActionParseError, ConfigError
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.core.types import Batch, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.micro_batches import make_unscored_sample
from ludus.trainer.learner.warm_start import Exchange, tokenize_conversation
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.messages import make_result, mark_completion
from ludus.trainer.models.tool_calls import ToolCall, ToolSpec
from ludus.trainer.sft.examples import ChatExample


@dataclass(frozen=True, slots=True)
class ConversationSet:
    """Conversations as arrays of tokens."""

    token_ids: np.ndarray
    """int32 [number of all tokens]"""
    is_trained: np.ndarray
    """bool [number of all tokens] True for the tokens of responses."""
    offsets: np.ndarray
    """int64 [S + 1] start of each sequence in `token_ids`."""
    first_sequences: np.ndarray
    """int64 [N + 1] first sequence of each conversation."""
    num_dropped: int = 0
    """Number of conversations that are left out, because they are too long."""
    num_truncated: int = 0
    """Number of conversations that are cut off."""

    def __len__(self) -> int:
        return len(self.first_sequences) - 1

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens that are trained on in one pass."""
        return int(self.is_trained.sum())

    def make_batch(self, indices: Sequence[int]) -> Batch:
        """Return the conversations as a batch in which every trained token has advantage 1."""
        samples = []
        for index in indices:
            for sequence in range(*self.first_sequences[index : index + 2].tolist()):
                tokens = slice(*self.offsets[sequence : sequence + 2].tolist())
                mask = self.is_trained[tokens]
                zeros = np.zeros(len(mask), dtype=np.float32)
                samples.append(
                    TrainingSample(
                        self.token_ids[tokens].astype(np.int64),
                        mask,
                        rollout_logprobs=zeros,
                        advantages=mask.astype(np.float32),
                        rewards=zeros,
                        terminated=True,
                    )
                )
        return collate(samples)

    def compute_fingerprint(self) -> str:
        """Return a hash of all conversations."""
        digest = hashlib.blake2b(digest_size=16)
        for numbers in (self.token_ids, self.is_trained, self.offsets, self.first_sequences):
            digest.update(numbers.tobytes())
        return digest.hexdigest()


class _Collector:
    """A growing set of conversations."""

    def __init__(self) -> None:
        self.token_ids, self.is_trained = array("i"), bytearray()
        self.offsets, self.first_sequences = array("q", [0]), array("q", [0])

    def add(self, samples: Iterable[TrainingSample]) -> None:
        """Add a conversation."""
        for sample in samples:
            self.token_ids.extend(sample.token_ids)
            self.is_trained.extend(map(bool, sample.loss_mask))
            self.offsets.append(len(self.token_ids))
        self.first_sequences.append(len(self.offsets) - 1)


def encode_examples(
    examples: Iterable[ChatExample], tokenizer: ChatTokenizer, config: SftData, field: str
) -> ConversationSet:
    """Encode examples one after the other.

    Args:
        field: name of the configuration field with the path, for messages.

    Raises:
        ConfigError: there are no examples, the template refuses one, or one is too long and
            data.overlong = "refuse".
    """
    collector, encoder = _Collector(), _Encoder(tokenizer)
    max_tokens, num_examples, num_too_long, longest = config.max_tokens, 0, 0, (0, "")
    for num_examples, example in enumerate(examples, start=1):  # noqa: B007
        samples = encoder.encode(example)
        length = max(len(sample.token_ids) for sample in samples)
        longest = max(longest, (length, example.location), key=lambda entry: entry[0])
        if length > max_tokens:
            num_too_long += 1
            samples = _truncate(samples, max_tokens) if config.overlong == "truncate" else []
        if samples:
            collector.add(samples)
    if not num_examples:
        raise ConfigError(f"{field} has no rows; give a data set with conversations")
    if num_too_long and config.overlong == "refuse":
        raise ConfigError(
            f"{num_too_long} of {num_examples} conversations are longer than data.max_tokens = "
            f"{max_tokens} tokens; the longest has {longest[0]} ({longest[1]}); raise "
            "data.max_tokens, or set data.overlong = 'drop' or 'truncate'"
        )
    num_kept = len(collector.first_sequences) - 1
    if not num_kept:
        raise ConfigError(
            f"all {num_examples} conversations are longer than data.max_tokens = {max_tokens} "
            "tokens, and none is left; raise data.max_tokens"
        )
    return ConversationSet(
        np.frombuffer(collector.token_ids, np.int32),
        np.frombuffer(collector.is_trained, np.bool_),
        np.frombuffer(collector.offsets, np.int64),
        np.frombuffer(collector.first_sequences, np.int64),
        num_dropped=num_examples - num_kept,
        num_truncated=num_too_long - (num_examples - num_kept),
    )


def split_conversations(
    num_conversations: int, size: float, seed: int
) -> tuple[list[int], list[int]]:
    """Return the indices of the training conversations and of the held-out conversations.

    At least one conversation is held out if `size` is not 0, and at least one is not.
    """
    indices = list(range(num_conversations))
    if size == 0 or num_conversations < 2:
        return indices, []
    num_held_out = min(max(1, round(size * num_conversations)), num_conversations - 1)
    make_random(seed, Stream.SFT_SPLIT).shuffle(indices)
    return sorted(indices[num_held_out:]), sorted(indices[:num_held_out])


class BatchOrder:
    """The order of conversations: passes, each in another random order, one after the other."""

    def __init__(self, indices: Sequence[int], batch_size: int, seed: int) -> None:
        self._num_indices, self._batch_size = len(indices), batch_size

        @lru_cache(maxsize=2)
        def shuffle(epoch: int) -> list[int]:
            return make_random(seed, Stream.SFT_ORDER, epoch).sample(indices, len(indices))

        self._shuffle = shuffle

    def choose(self, step: int) -> list[int]:
        """Return the conversations of step `step`, from 0."""
        positions = range(step * self._batch_size, (step + 1) * self._batch_size)
        return [
            self._shuffle(position // self._num_indices)[position % self._num_indices]
            for position in positions
        ]


class _Encoder:
    """An encoder of examples, whose responses must fit the thoughts of the chat template."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer, self._thoughts = tokenizer, tokenizer.thoughts
        prompt = tokenizer.render_prompt([{"role": "user", "content": "-"}]).rstrip()
        # If thoughts are separate messages, their end is also the start of an ordinary answer.
        has_thought_tags = bool(self._thoughts.end) and not self._thoughts.answer_start
        self._has_empty_thought = has_thought_tags and prompt.endswith(self._thoughts.end)

    def encode(self, example: ChatExample) -> list[TrainingSample]:
        """Return the sequences of an example.

        Raises:
            ConfigError: the template refuses the example; the message names the row.
        """
        try:
            exchanges = self._name_results([*map(self._fit_thoughts, example.exchanges)])
            if self._tokenizer.keeps_thoughts:
                return [tokenize_conversation(self._tokenizer, exchanges)]
            return _tokenize_turns(self._tokenizer, exchanges)
        except ConfigError as error:
            raise ConfigError(f"{example.location}: {error}") from error

    def _name_results(self, exchanges: Sequence[Exchange]) -> list[Exchange]:
        """Return exchanges in which the results of calls have the names of the calls' tools.

        Many templates show such results in another form than other messages of a tool.
        """
        tools = exchanges[0].tools
        named_exchanges = [exchanges[0]]
        for previous, exchange in pairwise(exchanges):
            calls = self._read_calls(previous.response, tools)
            messages = exchange.messages
            results = list(takewhile(lambda message: message["role"] == "tool", messages))
            if calls and len(calls) == len(results):
                named: list[Message] = [
                    make_result(call, result["content"])
                    for call, result in zip(calls, results, strict=True)
                ]
                messages = [*named, *messages[len(results) :]]
            named_exchanges.append(replace(exchange, messages=messages))
        return named_exchanges

    def _read_calls(self, response: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        """Return the calls in a response; empty if the policy would receive an error for them."""
        names = {tool["function"]["name"] for tool in tools}
        try:
            calls = self._tokenizer.call_form.read_calls(self._thoughts.get_answer(response), tools)
        except ActionParseError:
            return []
        return calls if names.issuperset(call.name for call in calls) else []

    def _fit_thoughts(self, exchange: Exchange) -> Exchange:
        """Return the exchange with the response that the policy would sample.

        The start of a thought that the prompt already contains is removed. Text that the template
        writes before every answer, and not into the prompt, is added.
        """
        response, thoughts = exchange.response, self._thoughts
        if response.rstrip().endswith(self._tokenizer.end_text):
            raise ConfigError(
                f"the response ends with {self._tokenizer.end_text}, which would be learned as "
                "text, because the end token is added to every response; remove it from the "
                "response"
            )
        if self._has_empty_thought and thoughts.end in response:
            raise ConfigError(
                "the chat template puts an empty thought before the response, but the response "
                f"contains {thoughts.end}; set model.enable_thinking = true, or remove the thought"
            )
        answer_start = thoughts.answer_start
        if answer_start and answer_start not in response:
            if not self._tokenizer.call_form.find_blocks(response):
                response = answer_start + response
            return Exchange(exchange.messages, response, exchange.tools)
        if not thoughts.is_open:
            return exchange
        if thoughts.end not in response:
            raise ConfigError(
                "the chat template starts a thought before the response, but the response does not "
                f"end one with {thoughts.end}; add the thought, or use a template without thoughts"
            )
        response = response.lstrip().removeprefix(thoughts.start).removeprefix("\n")
        return Exchange(exchange.messages, response, exchange.tools)


def _tokenize_turns(
    tokenizer: ChatTokenizer, exchanges: Sequence[Exchange]
) -> list[TrainingSample]:
    """Tokenize a conversation whose template rewrites earlier turns.

    A turn starts another sequence if its prompt does not continue the tokens of the turn before.
    """
    tools, messages = exchanges[0].tools, list[Message]()
    sequences: list[tuple[list[int], list[bool]]] = []
    next_messages = [*(exchange.messages for exchange in exchanges[1:]), list[Message]()]
    for exchange, followers in zip(exchanges, next_messages, strict=True):
        messages += exchange.messages
        prompt_ids = tokenizer.encode_whole_prompt(messages, tools)
        token_ids, mask = sequences[-1] if sequences else ([], [])
        if not sequences or prompt_ids[: len(token_ids)] != token_ids:
            token_ids, mask = [], []
            sequences.append((token_ids, mask))
        response_ids = tokenizer.encode_completion(
            exchange.response, end_token_id=tokenizer.find_end_token(followers)
        )
        mask += [False] * (len(prompt_ids) - len(token_ids)) + [True] * len(response_ids)
        token_ids[:] = prompt_ids + response_ids
        messages.append(mark_completion({"role": "assistant", "content": exchange.response}))
    return [make_unscored_sample(token_ids, mask) for token_ids, mask in sequences]


def _truncate(samples: Sequence[TrainingSample], max_tokens: int) -> list[TrainingSample]:
    """Return the starts of the sequences, without sequences that have no trained token left."""
    return [
        make_unscored_sample(
            list(sample.token_ids[:max_tokens]), list(sample.loss_mask[:max_tokens])
        )
        for sample in samples
        if any(sample.loss_mask[:max_tokens])
    ]

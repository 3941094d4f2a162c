"""Completions for code that is not ours: what a rollout function asks the engine for.

    POST /generate/                 --+
                                      +--> complete(prompts, n) --> generator, one request each
    generate_rollout_completions()  --+             |
                                                    v
                                     ledger of the call: what was sampled after which tokens

What the function returns is looked up there: which weights sampled it, and with which log-probs.
A call's random numbers follow from its groups, so that the same function plays the same episodes
whatever form it has: answer r of the k-th request of R rows draws from key r.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ludus.env import Message
from ludus.proto.errors import RolloutFunctionError
from ludus.trainer.core.interfaces import GenerateFn
from ludus.trainer.core.streams import Stream, derive_key, mix
from ludus.trainer.core.types import Completion, Sampling
from ludus.trainer.models.chat import ChatTokenizer

Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
"""Text as it is, a conversation that the chat template is applied to, or tokens."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion, and how it was sampled."""

    completion: Completion
    sampling: Sampling


@dataclass(slots=True)
class Call:
    """One call of a rollout function, and what was sampled for it."""

    keys: Sequence[int]
    """[rows] what each row's random numbers come from."""
    is_over: bool = False
    """Set once nobody waits for it any more."""
    _num_requests: int = 0
    _sampled: dict[tuple[int, ...], list[Sampled]] = field(default_factory=dict)

    def next_keys(self, num_rows: int) -> list[int]:
        """[num_rows] the keys of the next request."""
        request, self._num_requests = self._num_requests, self._num_requests + 1
        num = len(self.keys)
        return [mix(self.keys[row % num], request, row // num) for row in range(num_rows)]

    def note(self, prompt_ids: Sequence[int], sampled: Sampled) -> None:
        """Keep what was sampled after these tokens."""
        self._sampled.setdefault(tuple(prompt_ids), []).append(sampled)

    def find(self, before: Sequence[int], token_ids: Sequence[int]) -> Sampled | None:
        """The completion after `before` that begins with `token_ids`; None where there is none."""
        wanted = list(token_ids)
        for sampled in self._sampled.get(tuple(before), ()):
            if sampled.completion.token_ids[: len(wanted)] == wanted:
                return sampled
        return None


class Completions:
    """The worker's engine for others; one call of a rollout function at a time."""

    def __init__(
        self, generate: GenerateFn, chat: ChatTokenizer, max_tokens: int, run_seed: int, number: int
    ) -> None:
        """`max_tokens` bounds prompt and completion; `number` is the worker's."""
        self._generate = generate
        self._chat = chat
        self._max_tokens = max_tokens
        self._keys_between_calls = (
            derive_key(run_seed, Stream.ANSWER, number, count) for count in itertools.count()
        )
        self._call: Call | None = None

    @contextmanager
    def call(self, keys: Sequence[int]) -> Iterator[Call]:
        """A call of a rollout function, to which everything belongs that is asked for within."""
        self._call = call = Call(keys)
        try:
            yield call
        finally:
            call.is_over = True
            self._call = None

    def prompt_ids(self, prompt: Prompt, *, as_chat: bool | None = None) -> list[int]:
        """The tokens of a prompt.

        Args:
            as_chat: whether the chat template is applied; None where the prompt is messages.

        Raises:
            RolloutFunctionError: it is no prompt, or a token of no model.
        """
        if isinstance(prompt, str):
            if as_chat:
                return self._chat.first_prompt([{"role": "user", "content": prompt}])
            return self._chat.text_ids(prompt)
        if isinstance(prompt, Sequence) and prompt:
            if all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in prompt):
                if as_chat is False:
                    raise RolloutFunctionError(
                        "as_chat = False expected a prompt of text or token ids, got messages, "
                        "which go through the chat template; leave it out, or send text"
                    )
                return self._chat.first_prompt(prompt)  # type: ignore[arg-type]
            if all(isinstance(one, int) and not isinstance(one, bool) for one in prompt):
                return self._in_vocabulary(list(prompt))  # type: ignore[arg-type]
        raise RolloutFunctionError(
            f"expected a prompt as text, messages or token ids, got {prompt!r:.100}"
        )

    def _in_vocabulary(self, token_ids: list[int]) -> list[int]:
        """The tokens; one that has no embedding would fail the engine, and all that it answers."""
        size = len(self._chat.tokenizer)
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < size:
                raise RolloutFunctionError(
                    f"expected token ids below {size}, the size of the vocabulary, got {token_id} "
                    f"at place {place} of a prompt"
                )
        return token_ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Sampled tokens as text, without special tokens."""
        return self._chat.decode(list(token_ids))

    async def complete(
        self, prompts: Sequence[list[int]], n: int, sampling: Sampling
    ) -> list[Completion]:
        """[len(prompts) * n] completions, prompt by prompt.

        Raises:
            RolloutFunctionError: a prompt leaves no room for an answer.
        """
        for prompt in prompts:
            if not 0 < len(prompt) < self._max_tokens:
                raise RolloutFunctionError(
                    f"expected prompts of 1 to {self._max_tokens - 1} tokens, which leave room for "
                    f"an answer within rollout.max_tokens = {self._max_tokens}, got one of "
                    f"{len(prompt)}; shorten it, or raise rollout.max_tokens"
                )
        rows = [prompt for prompt in prompts for _ in range(n)]
        call = self._call
        if call is None:
            keys = list(itertools.islice(self._keys_between_calls, len(rows)))
        else:
            keys = call.next_keys(len(rows))
        answers = await asyncio.gather(
            *(self._one(row, sampling, key) for row, key in zip(rows, keys, strict=True))
        )
        if call is not None:
            for row, answer in zip(rows, answers, strict=True):
                call.note(row, Sampled(answer, sampling))
        return answers

    async def _one(self, prompt_ids: list[int], sampling: Sampling, key: int) -> Completion:
        room = self._max_tokens - len(prompt_ids)
        bounded = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return await self._generate(prompt_ids, bounded, key)

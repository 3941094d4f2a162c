"""Completions for a rollout function, which requests them from the engine.

    POST /generate/                 --+
                                      +--> complete(prompts, n) --> generator, one request each
    generate_rollout_completions()  --+             |
                                                    v
                                     RolloutCall: the completions of each prompt

The rows that the function returns are looked up in the RolloutCall, which knows the log-probs and
the weights of every completion. A call's random numbers depend on its groups only, so a function
plays the same episodes with every signature: completion r of the k-th request of R rows uses key r.
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
from ludus.trainer.core.types import SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer

Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
"""Plain text, messages that the chat template renders, or tokens."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A completion and its sampling settings."""

    completion: SampledCompletion
    sampling: Sampling


@dataclass(slots=True)
class RolloutCall:
    """One call of a rollout function, with the completions that were sampled for it."""

    keys: Sequence[int]
    """[rows] key of each row's random numbers."""
    is_over: bool = False
    """True once the call has ended, also by a timeout."""
    _num_requests: int = 0
    _entries: dict[tuple[int, ...], list[LedgerEntry]] = field(default_factory=dict)

    def next_keys(self, num_rows: int) -> list[int]:
        """Return [num_rows] keys for the next request."""
        request, self._num_requests = self._num_requests, self._num_requests + 1
        num = len(self.keys)
        return [mix(self.keys[row % num], request, row // num) for row in range(num_rows)]

    def record(self, prompt_ids: Sequence[int], entry: LedgerEntry) -> None:
        """Record a completion of a prompt."""
        self._entries.setdefault(tuple(prompt_ids), []).append(entry)

    def find(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> LedgerEntry | None:
        """Return the completion of a prompt that starts with `token_ids`; None if there is none."""
        start = list(token_ids)
        for entry in self._entries.get(tuple(prompt_ids), ()):
            if entry.completion.token_ids[: len(start)] == start:
                return entry
        return None


class CompletionService:
    """Samples completions for one rollout function, which is called once at a time."""

    def __init__(
        self,
        generate: GenerateFn,
        chat: ChatTokenizer,
        max_tokens: int,
        run_seed: int,
        worker_index: int,
    ) -> None:
        """Create the service; `max_tokens` limits the length of prompt and completion."""
        self._generate = generate
        self._chat = chat
        self._max_tokens = max_tokens
        self._keys_between_calls = (
            derive_key(run_seed, Stream.ANSWER, worker_index, count) for count in itertools.count()
        )
        self._call: RolloutCall | None = None

    @contextmanager
    def open_call(self, keys: Sequence[int]) -> Iterator[RolloutCall]:
        """Yield the record of a call; completions are recorded in it until the block ends."""
        self._call = call = RolloutCall(keys)
        try:
            yield call
        finally:
            call.is_over = True
            self._call = None

    def prompt_ids(self, prompt: Prompt, *, as_chat: bool | None = None) -> list[int]:
        """Return the tokens of a prompt; `as_chat` None applies the template to messages only."""
        if isinstance(prompt, str):
            if as_chat:
                return self._chat.first_prompt([{"role": "user", "content": prompt}])
            return self._chat.text_ids(prompt)
        if isinstance(prompt, Sequence) and prompt:
            if all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
                if as_chat is False:
                    raise RolloutFunctionError(
                        "as_chat = False needs a prompt of text or token ids, but the prompt is "
                        "messages, which need the chat template; remove as_chat, or send text"
                    )
                return self._chat.first_prompt(prompt)  # type: ignore[arg-type]
            if all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
                return self._check_vocabulary(list(prompt))  # type: ignore[arg-type]
        raise RolloutFunctionError(
            f"expected a prompt as text, messages or token ids, got {prompt!r:.100}"
        )

    def _check_vocabulary(self, token_ids: list[int]) -> list[int]:
        """Return the tokens; a token without an embedding would stop the engine for all callers."""
        size = len(self._chat.tokenizer)
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < size:
                raise RolloutFunctionError(
                    f"expected token ids below {size}, the size of the vocabulary, got {token_id} "
                    f"at position {position} of a prompt"
                )
        return token_ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Return sampled tokens as text, without special tokens."""
        return self._chat.decode(list(token_ids))

    async def complete(
        self, prompts: Sequence[list[int]], n: int, sampling: Sampling
    ) -> list[SampledCompletion]:
        """Return [len(prompts) * n] completions, prompt by prompt."""
        for prompt in prompts:
            if not 0 < len(prompt) < self._max_tokens:
                raise RolloutFunctionError(
                    f"expected prompts of 1 to {self._max_tokens - 1} tokens, which leave room for "
                    f"a completion within rollout.max_tokens = {self._max_tokens}, got one of "
                    f"{len(prompt)}; shorten it, or raise rollout.max_tokens"
                )
        rows = [prompt for prompt in prompts for _ in range(n)]
        call = self._call
        if call is None:
            keys = list(itertools.islice(self._keys_between_calls, len(rows)))
        else:
            keys = call.next_keys(len(rows))
        completions = await asyncio.gather(
            *(self._sample(row, sampling, key) for row, key in zip(rows, keys, strict=True))
        )
        if call is not None:
            for row, completion in zip(rows, completions, strict=True):
                call.record(row, LedgerEntry(completion, sampling))
        return completions

    async def _sample(
        self, prompt_ids: list[int], sampling: Sampling, key: int
    ) -> SampledCompletion:
        room = self._max_tokens - len(prompt_ids)
        bounded = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return await self._generate(prompt_ids, bounded, key)

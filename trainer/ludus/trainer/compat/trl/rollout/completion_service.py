"""Completions for a rollout function, which requests them from the engine.

    POST /generate/                 --+
                                      +--> complete(prompts, n) --> generator, one request each
    generate_rollout_completions()  --+             |
                                                    v
                                     RolloutCall: the completions of each prompt

The rows that the function returns are looked up in the RolloutCall, which stores the log-probs and
the policy version of every completion. A call's random numbers depend only on its groups and on the
order of its requests, so a function plays the same episodes with every signature.

`POST /generate/` is served on a loopback port of a rollout worker, in the format of `trl
vllm-serve`. It has no authentication, because only code on the same machine can reach it.

    {"prompts": ["..."], "n": 8, "temperature": 1.0, "max_tokens": 32}
        --> {"prompt_ids": [[...]], "completion_ids": [[...] * 8], "logprobs": [[...] * 8]}
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ludus.env import Message
from ludus.env.incoming.faults import list_faults
from ludus.env.incoming.json_values import check_num_values
from ludus.env.limits import MAX_MESSAGE_BYTES
from ludus.env.serving.listeners import HttpListener
from ludus.env.types import MESSAGE_ROLES, has_message_role
from ludus.proto.errors import InvalidCallError, LudusError, RolloutFunctionError
from ludus.trainer.core.interfaces import GenerateFunction
from ludus.trainer.core.streams import Stream, derive_key, mix
from ludus.trainer.core.types import SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer, count_chars, is_surely_longer

Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
"""Plain text, messages that the chat template renders, or tokens."""
_log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_COMPLETIONS = 16_384
"""Maximum number of completions of a request. All are in memory until the last one ends."""
_ANY_FREE_PORT = 0


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """A completion and its sampling settings."""

    completion: SampledCompletion
    sampling: Sampling


@dataclass(slots=True)
class RolloutCall:
    """One call of a rollout function, with the completions that were sampled for it."""

    keys: Sequence[int]
    """[rows] key of the random numbers of each row."""
    is_over: bool = False
    """True when the call has returned or exceeded its time limit."""
    _num_requests: int = 0
    _records: dict[tuple[int, ...], list[CompletionRecord]] = field(default_factory=dict)

    def take_keys(self, num_rows: int) -> list[int]:
        """Return a key for each row of the next request."""
        index, self._num_requests = self._num_requests, self._num_requests + 1
        num_keys = len(self.keys)
        return [mix(self.keys[row % num_keys], index, row // num_keys) for row in range(num_rows)]

    def record(self, prompt_ids: Sequence[int], completion_record: CompletionRecord) -> None:
        """Record a completion of a prompt."""
        self._records.setdefault(tuple(prompt_ids), []).append(completion_record)

    def find(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> CompletionRecord | None:
        """Return the completion of a prompt that starts with `token_ids`, or None."""
        prefix = list(token_ids)
        for completion_record in self._records.get(tuple(prompt_ids), ()):
            if completion_record.completion.token_ids[: len(prefix)] == prefix:
                return completion_record
        return None


class CompletionService:
    """A service that samples completions for one rollout function, one call at a time."""

    def __init__(
        self,
        generate: GenerateFunction,
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
            derive_key(run_seed, Stream.ANSWER, worker_index, index) for index in itertools.count()
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

    def encode_prompt(self, prompt: Prompt, *, as_chat: bool | None = None) -> list[int]:
        """Return the tokens of a prompt; `as_chat` None applies the template to messages only."""
        if isinstance(prompt, str):
            self._check_characters(len(prompt))
            if as_chat:
                return self._chat.encode_first_prompt([{"role": "user", "content": prompt}])
            return self._chat.encode_text(prompt)
        if isinstance(prompt, Sequence) and prompt:
            if all(has_message_role(message) and "content" in message for message in prompt):
                if as_chat is False:
                    raise RolloutFunctionError(
                        "as_chat = False needs a prompt of text or token ids, but the prompt is "
                        "messages, which need the chat template; remove as_chat, or send text"
                    )
                self._check_characters(count_chars(prompt))  # type: ignore[arg-type]
                return self._chat.encode_first_prompt(prompt)  # type: ignore[arg-type]
            if all(
                isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in prompt
            ):
                return self._check_vocabulary(list(prompt))  # type: ignore[arg-type]
        raise RolloutFunctionError(
            "expected a prompt as text, as messages with the roles"
            f" {', '.join(MESSAGE_ROLES)}, or as token ids, got {prompt!r:.100}"
        )

    def _check_characters(self, num_chars: int) -> None:
        """Refuse a text that is too long even to be encoded."""
        if is_surely_longer(num_chars, self._max_tokens):
            raise self._make_length_error(f"{num_chars} characters")

    def _make_length_error(self, length: str) -> RolloutFunctionError:
        return RolloutFunctionError(
            f"expected prompts of 1 to {self._max_tokens - 1} tokens, which leave room for "
            f"a completion within rollout.max_tokens = {self._max_tokens}, got one of "
            f"{length}; shorten it, or raise rollout.max_tokens"
        )

    def _check_vocabulary(self, token_ids: list[int]) -> list[int]:
        """Return the tokens if all are in the vocabulary.

        A token without an embedding would stop the engine for all callers.
        """
        vocab_size = len(self._chat.tokenizer)
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                raise RolloutFunctionError(
                    f"expected token ids below {vocab_size}, the size of the vocabulary, got "
                    f"{token_id} at position {position} of a prompt"
                )
        return token_ids

    @property
    def end_token_ids(self) -> frozenset[int]:
        """All tokens that end a completion."""
        return self._chat.end_token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return sampled tokens as text, without end tokens and padding."""
        return self._chat.decode(list(token_ids))

    async def complete(
        self, prompts: Sequence[list[int]], n: int, sampling: Sampling
    ) -> list[SampledCompletion]:
        """Return [len(prompts) * n] completions, prompt by prompt."""
        for prompt in prompts:
            if not 0 < len(prompt) < self._max_tokens:
                raise self._make_length_error(str(len(prompt)))
        rows = [prompt for prompt in prompts for _ in range(n)]
        call = self._call
        if call is None:
            keys = list(itertools.islice(self._keys_between_calls, len(rows)))
        else:
            keys = call.take_keys(len(rows))
        completions = await asyncio.gather(
            *(self._sample(row, sampling, key) for row, key in zip(rows, keys, strict=True))
        )
        if call is not None:
            for row, completion in zip(rows, completions, strict=True):
                call.record(row, CompletionRecord(completion, sampling))
        return completions

    async def _sample(self, prompt: list[int], sampling: Sampling, key: int) -> SampledCompletion:
        max_tokens = min(sampling.max_tokens, self._max_tokens - len(prompt))
        return await self._generate(prompt, replace(sampling, max_tokens=max_tokens), key)


class GenerateRequest(BaseModel):
    """The body of a request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: Annotated[list[str | list[int]], Field(min_length=1)]
    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    """Number of most likely tokens to sample from; 0 and below select all tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 16
    """Maximum number of sampled tokens; reduced if there is less room."""
    images: None = None
    truncate_prompt_tokens: None = None
    guided_decoding_regex: None = None
    structured_outputs_regex: None = None

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of each completion."""
        return Sampling(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
        )


class GeneratePort:
    """The HTTP server of one runner, created and used on one event loop."""

    def __init__(self, completions: CompletionService, port: int) -> None:
        """Bind the port, or a free one if `port` is 0 or is in use."""
        self._completions = completions
        routes = [
            Route(path, self._generate, methods=["POST"]) for path in ("/generate/", "/generate")
        ]
        routes += [Route(path, _report_health) for path in ("/health/", "/health")]
        # TRL's scripts call http://0.0.0.0:8000, which also means this machine.
        self._listener = HttpListener(
            Starlette(routes=routes), _bind_port(port), allowed_hosts=["0.0.0.0"]
        )

    @property
    def port(self) -> int:
        """Port of the server."""
        return self._listener.port

    async def start(self) -> None:
        """Start the server."""
        await self._listener.start()

    async def stop(self) -> None:
        """Stop the server."""
        await self._listener.stop()

    async def _generate(self, request: Request) -> Response:
        body = await _read_body(request)
        if body is None:
            return JSONResponse({"detail": f"expected at most {MAX_MESSAGE_BYTES} bytes"}, 413)
        try:
            check_num_values(body)
            generate = GenerateRequest.model_validate_json(body)
        except InvalidCallError as error:
            return JSONResponse({"detail": error.message}, 413)
        except ValidationError as error:
            mistakes = list_faults(error, with_input=False)
            details = [{**mistake, "loc": ["body", *mistake["loc"]]} for mistake in mistakes]
            return JSONResponse({"detail": details}, 422)
        if len(generate.prompts) * generate.n > MAX_COMPLETIONS:
            detail = (
                f"expected at most {MAX_COMPLETIONS} completions of one request, got "
                f"{len(generate.prompts)} prompts times n = {generate.n}; send several requests"
            )
            return JSONResponse({"detail": detail}, 422)
        try:
            prompts = [self._completions.encode_prompt(prompt) for prompt in generate.prompts]
            completions = await self._completions.complete(prompts, generate.n, generate.sampling)
        except LudusError as error:
            return JSONResponse({"detail": str(error)}, 422)
        return JSONResponse(
            {
                "prompt_ids": prompts,
                "completion_ids": [completion.token_ids for completion in completions],
                "logprobs": [completion.logprobs for completion in completions],
            }
        )


async def _read_body(request: Request) -> bytes | None:
    """Return the body. If it is too large, stop reading and return None."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_MESSAGE_BYTES:
            return None
    return bytes(content)


async def _report_health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _bind_port(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        listener = socket.create_server((HOST, _ANY_FREE_PORT))
        _log.warning(
            "rollout.generate_port = %d cannot be bound (%s); this worker listens on %d, as "
            "args.vllm_server_port reports",
            *(port, error.strerror, listener.getsockname()[1]),
        )
        return listener

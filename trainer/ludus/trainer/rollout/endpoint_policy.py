"""A policy behind an OpenAI-compatible endpoint, for evaluations only.

    messages --POST /chat/completions--> text, tool calls --> the text that the adapter applies

The endpoint has its own chat template and tokenizer, so an episode has texts and no tokens. Tool
calls that the endpoint has parsed are written into the text again, in the form that the adapter
reads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from ludus.env import Message
from ludus.env.text.unicode import format_json
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, NotFoundError, UnavailableError
from ludus.trainer.core.answer_trie import AnswerTrie
from ludus.trainer.core.streams import mix
from ludus.trainer.core.types import SampledCompletion, Sampling, TokenSequence, Turn
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.system_text import skip_system_messages
from ludus.trainer.models.thoughts import THINK, ThoughtForm
from ludus.trainer.models.tool_calls import HERMES, CallForm
from ludus.trainer.rollout.conversation import Conversation, ConversationFullError
from ludus.trainer.rollout.episode import TurnLoopRunner

MAX_ATTEMPTS = 5
"""Number of times that a request is sent if the endpoint is overloaded or does not respond."""
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_CHARACTERS = 200
_MAX_SEED = 2**31
_MAX_LISTED_MODELS = 10


@dataclass(frozen=True, slots=True)
class EndpointMessage:
    """The message that an endpoint returned."""

    text: str
    """Content, followed by the tool calls as tagged JSON."""
    message: JsonObject
    """The message in the form in which later requests contain it."""
    is_cut: bool
    """True if the completion reached its maximum number of tokens."""


class Endpoint:
    """A client of an OpenAI-compatible endpoint."""

    def __init__(self, url: str, token: str | None, token_env: str, timeout_s: float) -> None:
        """Create the client; `token_env` is the variable with the token, for messages."""
        self.url = complete_url(url)
        token = (token or "").strip()
        if not (token.isascii() and token.isprintable()):
            raise ConfigError(
                f"the token in the variable {token_env} must contain printable ASCII characters "
                "only; set the variable again, or name another variable with --token-env"
            )
        self._token_env, self._has_token = token_env, bool(token)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
        )
        self._limit_name = "max_tokens"

    async def check(self, models: Sequence[str]) -> None:
        """Check that the endpoint responds, accepts the token and has the models.

        Raises:
            ConfigError: the endpoint does not respond, or wants a token.
            NotFoundError: the endpoint lists its models, and one of `models` is not among them.
        """
        try:
            response = await self._client.get(f"{self.url}/models")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise ConfigError(
                f"--endpoint {self.url} does not respond ({_describe_error(error)}); start the "
                "server, or correct the address"
            ) from error
        self._refuse_denied(response)
        known_models = _list_models(response)
        unknown_models = [model for model in models if model not in known_models]
        if known_models and unknown_models:
            shown_models = ", ".join(known_models[:_MAX_LISTED_MODELS])
            raise NotFoundError(
                f"--endpoint {self.url} has no model '{unknown_models[0]}'; it has {shown_models}"
            )

    async def complete(
        self,
        model: str,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        sampling: Sampling,
        seed: int,
    ) -> EndpointMessage:
        """Return the completion of a conversation.

        Raises:
            ConversationFullError: the prompt is longer than the model's context.
            ConfigError: the endpoint refuses the token or the model.
            UnavailableError: the endpoint did not respond, or returned an error.
        """
        body: JsonObject = {"model": model, "messages": list(messages), "seed": seed % _MAX_SEED}
        body |= _list_sampling(sampling)
        if tools:
            body["tools"] = list(tools)
        response = await self._post(body | {self._limit_name: sampling.max_tokens})
        if self._limit_name == "max_tokens" and _refuses(response, "max_completion_tokens"):
            # Newer models of OpenAI accept only the new name, older servers only the old one.
            self._limit_name = "max_completion_tokens"
            response = await self._post(body | {self._limit_name: sampling.max_tokens})
        self._refuse_denied(response)
        if response.status_code != httpx.codes.OK:
            raise self._make_error(model, response)
        try:
            return _read_message(response.json())
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise UnavailableError(
                f"{self.url} returned no chat completion, got {_shorten(response.text)!r}"
            ) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _post(self, body: JsonObject) -> httpx.Response:
        pause_s, failure = _FIRST_PAUSE_S, ""
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            try:
                response = await self._client.post(f"{self.url}/chat/completions", json=body)
            except httpx.TransportError as error:
                failure = _describe_error(error)
                continue
            is_overloaded = response.status_code == httpx.codes.TOO_MANY_REQUESTS
            if not is_overloaded and response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                return response
            failure = _describe_response(response)
            pause_s = max(pause_s, _read_retry_pause(response))
        raise UnavailableError(f"{self.url} failed {MAX_ATTEMPTS} times: {failure}")

    def _refuse_denied(self, response: httpx.Response) -> None:
        if response.status_code not in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            return
        problem = (
            f"refuses the token in the variable {self._token_env}"
            if self._has_token
            else f"wants a token, and the variable {self._token_env} is not set"
        )
        raise ConfigError(
            f"--endpoint {self.url} {problem} (HTTP {response.status_code}); set {self._token_env},"
            " or name another variable with --token-env"
        )

    def _make_error(self, model: str, response: httpx.Response) -> Exception:
        text = _describe_response(response)
        if _is_context_error(response):
            return ConversationFullError(f"{self.url} refused the prompt: {text}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return NotFoundError(f"--endpoint {self.url} has no model '{model}': {text}")
        return ConfigError(f"--endpoint {self.url} refused a request: {text}")


@dataclass(eq=False, kw_only=True)
class EndpointConversation(Conversation):
    """A conversation whose completions an endpoint samples."""

    endpoint: Endpoint
    model: str
    _sent_messages: list[JsonObject] = field(default_factory=list, init=False)
    """All messages of earlier requests and their completions, in the form of the endpoint."""

    @property
    def thoughts(self) -> ThoughtForm:
        return THINK

    @property
    def has_room(self) -> bool:
        """True while the limits allow another completion. The endpoint knows its own context."""
        return self.num_turns < self.limits.max_turns

    async def encode_long_messages(self) -> None:
        """Do nothing, because the endpoint encodes the messages."""

    async def complete(self, answers: AnswerTrie | None = None) -> str:
        """Request one completion and return its text. No endpoint can restrict it to answers."""
        assert answers is None
        self.refuse_if_full()
        new_messages = self.messages[self._num_answered_messages :]
        request_messages = [*self._sent_messages, *self._make_request_messages(new_messages)]
        seed = mix(self.key, self.num_turns)
        response = await self.endpoint.complete(
            self.model, request_messages, self._tools, self.sampling, seed
        )
        completion = SampledCompletion([], [], 0, has_end_token=not response.is_cut)
        turn = Turn([], completion, messages=new_messages, text=response.text)
        turn.is_cut = response.is_cut
        self.turns.append(turn)
        self._sent_messages = [*request_messages, response.message]
        self.messages.append({"role": "assistant", "content": response.text})
        self._num_answered_messages = len(self.messages)
        return response.text

    def refuse_if_full(self) -> None:
        if not self.has_room:
            raise ConversationFullError(
                f"the limits allow no further completion: {self.num_turns} turns of at most "
                f"rollout.max_turns = {self.limits.max_turns}; raise the limit"
            )

    def make_sequences(self, *, include_unanswered: bool = False) -> tuple[TokenSequence, ...]:
        """Return nothing, because the tokens are unknown."""
        return ()

    def _find_system_text(self, turn: Turn) -> str:
        """Return the system messages and the tools of the request, which the endpoint renders."""
        if turn is not self.turns[0]:
            return ""
        num_others = len(skip_system_messages(turn.messages))
        system_messages = turn.messages[: len(turn.messages) - num_others]
        texts = [message["content"] for message in system_messages]
        return "\n".join([*texts, *map(format_json, self._tools)])

    def _make_request_messages(self, messages: Sequence[Message]) -> list[JsonObject]:
        """Return messages in the form of the endpoint; each parsed call gets one result."""
        calls = (self._sent_messages[-1].get("tool_calls") or []) if self._sent_messages else []
        results = [message["content"] for message in messages if message["role"] == "tool"]
        texts = [dict(message) for message in messages if message["role"] != "tool"]
        if not calls:
            # The endpoint has not parsed the calls, so it accepts no results of calls.
            contents = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
            return [*({"role": "user", "content": content} for content in contents), *texts]
        results += [results[-1] if results else "not called"] * (len(calls) - len(results))
        tool_messages = [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=False)
        ]
        return [*tool_messages, *texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRunner(TurnLoopRunner):
    """A runner of episodes whose completions an endpoint samples."""

    endpoint: Endpoint
    model: str

    @property
    def call_form(self) -> CallForm:
        return HERMES

    def make_record(self, sampling: Sampling, key: int) -> EndpointConversation:
        """Return the empty record of an episode."""
        return EndpointConversation(
            generate=self.generate,
            chat=self.chat,
            limits=self.limits,
            sampling=sampling,
            key=key,
            endpoint=self.endpoint,
            model=self.model,
        )


NO_TOKENIZER = cast(ChatTokenizer, None)
"""Tokenizer of a runner whose conversations never encode a text."""


def complete_url(url: str) -> str:
    """Return the base URL of an endpoint; without a path, it gets OpenAI's path /v1.

    Raises:
        ConfigError: the text is not an HTTP address, or contains a password.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_valid = is_valid and (parts.port is None or parts.port > 0)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"--endpoint must be the address of an OpenAI-compatible server, got '{url}'; for "
            "example http://127.0.0.1:8000/v1"
        )
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            "--endpoint must not contain a token or a password, because other users of this "
            "machine can read arguments; put the token into the variable that --token-env names"
        )
    base_url = url.rstrip("/").removesuffix("/chat/completions")
    return base_url if urlsplit(base_url).path else f"{base_url}/v1"


def _list_sampling(sampling: Sampling) -> JsonObject:
    """Return the parameters that differ from the defaults of the API, and the temperature."""
    parameters: JsonObject = {"temperature": sampling.temperature}
    defaults = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    for name, default in defaults.items():
        if getattr(sampling, name) != default:
            parameters[name] = getattr(sampling, name)
    return parameters


def _read_message(body: Any) -> EndpointMessage:
    choice = body["choices"][0]
    message = choice["message"]
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise TypeError(f"the content must be a text, got {content!r:.100}")
    calls = message.get("tool_calls") or []
    call_texts = [_format_call(call["function"]) for call in calls]
    sent_message: JsonObject = {"role": "assistant", "content": content}
    if calls:
        sent_message["tool_calls"] = calls
    # JSON can contain lone surrogates, which no file and no server accepts.
    text = "\n".join(filter(None, [content, *call_texts])).encode(errors="replace").decode()
    return EndpointMessage(text, sent_message, choice.get("finish_reason") == "length")


def _format_call(function: JsonObject) -> str:
    arguments = function.get("arguments") or "{}"
    arguments_json = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return (
        f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments_json}}}\n'
        "</tool_call>"
    )


def _list_models(response: httpx.Response) -> list[str]:
    """Return the ids of the endpoint's models; empty if it does not list them."""
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _refuses(response: httpx.Response, name: str) -> bool:
    return response.status_code == httpx.codes.BAD_REQUEST and name in response.text


def _is_context_error(response: httpx.Response) -> bool:
    text = response.text.lower()
    is_refusal = response.status_code in (400, 413, 422)
    return is_refusal and "context" in text and ("length" in text or "size" in text)


def _read_retry_pause(response: httpx.Response) -> float:
    try:
        return min(_MAX_PAUSE_S, max(0.0, float(response.headers.get("retry-after", 0))))
    except ValueError:
        return 0.0


def _describe_response(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}, {_shorten(response.text)!r}"


def _describe_error(error: Exception) -> str:
    return str(error) or type(error).__name__


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_MAX_ERROR_CHARACTERS]

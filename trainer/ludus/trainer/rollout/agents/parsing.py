"""Parsing of a completion into the response that the agent receives and the tokens that are kept.

    text      <think> ... </think> Let me look. <tool_call>...</tool_call> STOP and more
    response  reasoning            content       calls
    kept      ------------------------------------------------------------>

Engines do not support stop texts, so a completion is cut after it was sampled. The tokens after the
cut are dropped: the agent never sees them, and training on them would add noise. The tokens of the
stop text itself are kept like an EOS token, because they are the reason why the completion ended.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, replace

from ludus.proto.errors import ActionParseError
from ludus.trainer.core.types import SampledCompletion
from ludus.trainer.models.chat import ChatTokenizer, split_reasoning, thoughts_end
from ludus.trainer.rollout.adapters.tool_calls import first_call_end, read_calls, remove_calls
from ludus.trainer.rollout.agents.endpoint.exchange import (
    FunctionCall,
    PolicyRequest,
    PolicyResponse,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A completion, cut as its request demands, and the response to the agent."""

    completion: SampledCompletion
    """Tokens that are kept and trained on."""
    text: str
    """Text of these tokens, without the stop text."""
    response: PolicyResponse


def parse_completion(
    chat: ChatTokenizer,
    completion: SampledCompletion,
    request: PolicyRequest,
    num_prompt_tokens: int,
) -> ParsedCompletion:
    """Cut and parse a completion that was sampled after `num_prompt_tokens` tokens."""
    text = chat.decode(completion.token_ids)
    text_end, kept_end = _find_cut(text, request)
    is_cut = text_end < len(text)
    is_out_of_tokens = not completion.has_end_token and not is_cut
    if is_cut:
        completion = _first_tokens(chat, completion, text[:kept_end])
        text = text[:text_end]
    response = parse_response(text, with_calls=bool(request.tools))
    if is_out_of_tokens and not response.calls:
        response = replace(response, finish_reason="length")
    tokens: tuple[TokenLogprob, ...] = ()
    if request.with_logprobs:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        tokens = tuple(TokenLogprob(chat.decode([token]), logprob) for token, logprob in pairs)
    response = replace(
        response,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=len(completion.token_ids),
        tokens=tokens,
    )
    return ParsedCompletion(completion, text, response)


def parse_response(text: str, *, with_calls: bool) -> PolicyResponse:
    """Split a text into reasoning, content and calls."""
    reasoning, content = split_reasoning(text)
    try:
        calls = read_calls(content) if with_calls else []
    except ActionParseError:
        # The agent receives an invalid call as text, and decides how to continue.
        calls = []
    if not calls:
        return PolicyResponse(content, reasoning)
    function_calls = tuple(FunctionCall(call.name, json.dumps(call.arguments)) for call in calls)
    return PolicyResponse(remove_calls(content), reasoning, function_calls, "tool_calls")


def _find_cut(text: str, request: PolicyRequest) -> tuple[int, int]:
    """Return the end of the response's text, and the end of the text that is kept."""
    start = thoughts_end(text)
    cuts = [
        (index, index + len(stop))
        for stop in request.stop
        if (index := text.find(stop, start)) >= 0
    ]
    if request.max_one_call and request.tools:
        end = first_call_end(text[start:])
        if end is not None:
            cuts.append((start + end, start + end))
    return min(cuts, default=(len(text), len(text)))


def _first_tokens(
    chat: ChatTokenizer, completion: SampledCompletion, text: str
) -> SampledCompletion:
    """Return the smallest number of first tokens whose text starts with `text`."""
    token_ids = completion.token_ids
    num = bisect_left(
        range(len(token_ids)), len(text), key=lambda n: len(chat.decode(token_ids[:n]))
    )
    while num < len(token_ids) and not chat.decode(token_ids[:num]).startswith(text):
        num += 1
    return replace(
        completion,
        token_ids=token_ids[:num],
        logprobs=completion.logprobs[:num],
        has_end_token=False,
    )

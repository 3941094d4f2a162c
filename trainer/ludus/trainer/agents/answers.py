"""What was sampled, as the agent is told of it, and which of its tokens are kept.

    text      <think> ... </think> Let me look. <tool_call>...</tool_call> STOP and more
    told      thought              content       calls
    kept      ------------------------------------------------------------>

Engines know no texts to stop at. An answer is cut afterwards, and what follows the cut is
forgotten: nobody saw it, nothing came of it, and learning from it would be learning from noise. The
tokens of the text that it stopped at are kept, as an end token is: they are why it ended there.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, replace

from ludus.proto.errors import ActionParseError
from ludus.trainer.agents.exchange import Asked, FunctionCall, Said, TokenSaid
from ludus.trainer.core.types import Completion
from ludus.trainer.models.chat import ChatTokenizer, split_reasoning, thoughts_end
from ludus.trainer.rollout.tool_calls import end_of_first_call, read_calls, words_beside_calls


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer."""

    completion: Completion
    """The tokens that are kept, and trained on."""
    text: str
    """Of these tokens, before the text that they stopped at."""
    said: Said


def read_answer(
    chat: ChatTokenizer, completion: Completion, asked: Asked, num_prompt_tokens: int
) -> Answer:
    """The answer to `asked` that was sampled after a prompt of so many tokens."""
    text = chat.decode(completion.token_ids)
    told, kept = _find_cut(text, asked)
    is_cut = told < len(text)
    ran_out = not completion.has_end_token and not is_cut
    if is_cut:
        completion = _first_tokens(chat, completion, text[:kept])
        text = text[:told]
    said = read_said(text, with_calls=bool(asked.tools))
    if ran_out and not said.calls:
        said = replace(said, finish_reason="length")
    tokens: tuple[TokenSaid, ...] = ()
    if asked.with_logprobs:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        tokens = tuple(TokenSaid(chat.decode([one]), logprob) for one, logprob in pairs)
    return Answer(
        completion,
        text,
        replace(
            said,
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=len(completion.token_ids),
            tokens=tokens,
        ),
    )


def read_said(text: str, *, with_calls: bool) -> Said:
    """What a whole answer tells."""
    thought, answer = split_reasoning(text)
    try:
        calls = read_calls(answer) if with_calls else []
    except ActionParseError:
        # It is for the agent to say what it makes of such words.
        calls = []
    if not calls:
        return Said(answer, thought)
    made = tuple(FunctionCall(one.name, json.dumps(one.arguments)) for one in calls)
    return Said(words_beside_calls(answer), thought, made, "tool_calls")


def _find_cut(text: str, asked: Asked) -> tuple[int, int]:
    """Where what the agent is told ends, and where what is kept ends."""
    begin = thoughts_end(text)
    found = [
        (place, place + len(stop)) for stop in asked.stop if (place := text.find(stop, begin)) >= 0
    ]
    if asked.is_one_call and asked.tools:
        end = end_of_first_call(text[begin:])
        if end is not None:
            found.append((begin + end, begin + end))
    return min(found, default=(len(text), len(text)))


def _first_tokens(chat: ChatTokenizer, completion: Completion, text: str) -> Completion:
    """The fewest first tokens that say all of `text`, with which they begin."""
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

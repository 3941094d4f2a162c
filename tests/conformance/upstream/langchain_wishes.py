"""A program that sends every kind of request of LangChain's ChatOpenAI; prints JSON results.

langchain_wishes.py BASE_URL API_KEY
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from pydantic import BaseModel

QUESTION = "Where is the key?"


class Look(BaseModel):
    """Looks into a box."""

    box: str


def model(**fields: Any) -> ChatOpenAI:
    """Return the client with additional fields."""
    return ChatOpenAI(model="any", base_url=sys.argv[1], api_key=sys.argv[2], **fields)


def shown(message: Any) -> dict[str, Any]:
    """Return the content of a message."""
    calls = [[call["name"], call["args"], call["id"]] for call in message.tool_calls]
    usage = message.usage_metadata
    return {
        "text": message.text,
        "calls": calls,
        "num_tokens": usage["output_tokens"] if usage else None,
        "finish_reason": message.response_metadata.get("finish_reason"),
    }


def read_stream(runnable: Any) -> dict[str, Any]:
    """Return the joined pieces of a stream."""
    pieces = list(runnable.stream(QUESTION))
    message: AIMessageChunk = sum(pieces[1:], pieces[0])
    return {**shown(message), "num_pieces": len(pieces)}


def several() -> list[str]:
    """Return two responses to the same prompt."""
    [generations] = model(n=2).generate([[HumanMessage(QUESTION)]]).generations
    return [generation.message.text for generation in generations]


def logprobs() -> list[float]:
    """Return the log-probs of a response's tokens."""
    token_logprobs = model(logprobs=True).invoke(QUESTION).response_metadata["logprobs"]["content"]
    return [token_logprob["logprob"] for token_logprob in token_logprobs]


def read_refusal(method: str) -> str:
    """Return the refusal of a response that must fit a schema."""
    try:
        model().with_structured_output(Look, method=method).invoke(QUESTION)
    except BadRequestError as error:
        return f"{error.code} {error.param}"
    return "not refused"


async def at_once() -> list[dict[str, Any]]:
    """Send requests in parallel; return the messages."""
    questions = [f"{QUESTION} {number}" for number in range(4)]
    return [shown(message) for message in await model().abatch(questions)]


def main() -> None:
    """Print the result of each request."""
    one_call = model().bind_tools([Look], tool_choice="any", parallel_tool_calls=False)
    structured = model().with_structured_output(Look, method="function_calling")
    results = {
        "whole": shown(model(temperature=0.1, seed=4).invoke(QUESTION)),
        "streamed": read_stream(model(streaming=True, stream_usage=True)),
        "call": shown(one_call.invoke(QUESTION)),
        "streamed_call": read_stream(model(stream_usage=True).bind_tools([Look])),
        "responses_call": shown(model(use_responses_api=True).bind_tools([Look]).invoke(QUESTION)),
        "responses_streamed": read_stream(model(use_responses_api=True)),
        "structured": structured.invoke(QUESTION).box,
        "stopped": shown(model(stop=["STOP"]).invoke(QUESTION)),
        "cut": shown(model(max_tokens=2).invoke(QUESTION)),
        "several": several(),
        "logprobs": logprobs(),
        "at_once": asyncio.run(at_once()),
        "refused": [read_refusal("json_schema"), read_refusal("json_mode")],
    }
    sys.stdout.write(f"\n{json.dumps(results)}\n")


if __name__ == "__main__":
    main()

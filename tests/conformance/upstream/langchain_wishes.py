"""Program that sends each kind of request of LangChain's ChatOpenAI, and prints JSON results.

Usage: langchain_wishes.py BASE_URL API_KEY
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

PROMPT = "Where is the key?"


class Look(BaseModel):
    """Looks into a box."""

    box: str


def connect(**fields: Any) -> ChatOpenAI:
    """Return a client with these additional fields."""
    return ChatOpenAI(model="any", base_url=sys.argv[1], api_key=sys.argv[2], **fields)


def parse(message: Any) -> dict[str, Any]:
    """Return the text, tool calls, token count and finish reason of a message."""
    calls = [[call["name"], call["args"], call["id"]] for call in message.tool_calls]
    usage = message.usage_metadata
    return {
        "text": message.text,
        "calls": calls,
        "num_tokens": usage["output_tokens"] if usage else None,
        "finish_reason": message.response_metadata.get("finish_reason"),
    }


def read_stream(runnable: Any) -> dict[str, Any]:
    """Return the parsed message of a stream, and its number of pieces."""
    pieces = list(runnable.stream(PROMPT))
    message: AIMessageChunk = sum(pieces[1:], pieces[0])
    return {**parse(message), "num_pieces": len(pieces)}


def sample_two_responses() -> list[str]:
    """Return two responses to the same prompt."""
    [generations] = connect(n=2).generate([[HumanMessage(PROMPT)]]).generations
    return [generation.message.text for generation in generations]


def read_logprobs() -> list[float]:
    """Return the log-probs of a response's tokens."""
    token_logprobs = connect(logprobs=True).invoke(PROMPT).response_metadata["logprobs"]["content"]
    return [token_logprob["logprob"] for token_logprob in token_logprobs]


def read_refusal(method: str) -> str:
    """Request structured output; return the code and parameter of the error."""
    try:
        connect().with_structured_output(Look, method=method).invoke(PROMPT)
    except BadRequestError as error:
        return f"{error.code} {error.param}"
    return "not refused"


async def send_parallel() -> list[dict[str, Any]]:
    """Send four requests in parallel; return the parsed messages."""
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    return [parse(message) for message in await connect().abatch(prompts)]


def main() -> None:
    """Print the result of each request."""
    call_client = connect().bind_tools([Look], tool_choice="any", parallel_tool_calls=False)
    schema_client = connect().with_structured_output(Look, method="function_calling")
    results = {
        "whole": parse(connect(temperature=0.1, seed=4).invoke(PROMPT)),
        "streamed": read_stream(connect(streaming=True, stream_usage=True)),
        "call": parse(call_client.invoke(PROMPT)),
        "streamed_call": read_stream(connect(stream_usage=True).bind_tools([Look])),
        "responses_call": parse(connect(use_responses_api=True).bind_tools([Look]).invoke(PROMPT)),
        "responses_streamed": read_stream(connect(use_responses_api=True)),
        "structured": schema_client.invoke(PROMPT).box,
        "stopped": parse(connect(stop=["STOP"]).invoke(PROMPT)),
        "cut": parse(connect(max_tokens=2).invoke(PROMPT)),
        "several": sample_two_responses(),
        "logprobs": read_logprobs(),
        "at_once": asyncio.run(send_parallel()),
        "refused": [read_refusal("json_schema"), read_refusal("json_mode")],
    }
    sys.stdout.write(f"\n{json.dumps(results)}\n")


if __name__ == "__main__":
    main()

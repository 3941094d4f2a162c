"""Tests of the size of bodies that the agent endpoint reads, checked before they arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ludus.env.limits import MAX_MESSAGE_BYTES
from ludus.proto.config import RolloutConfig
from ludus.trainer.core.types import SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ChatMessage,
    LimitError,
    PolicyRequest,
)
from ludus.trainer.rollout.agents.endpoint.server import AgentEndpoint, EndpointAccess
from tests.agents.random_policy import make_tiny_chat

MAX_TOKENS = 4_000
LIMITS = RolloutConfig(max_completion_tokens=200, max_tokens=MAX_TOKENS, max_turns=8)
PATHS = ("/v1/chat/completions", "/v1/responses")


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return make_tiny_chat()


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[AgentEndpoint]:
    agent_endpoint = AgentEndpoint()
    await agent_endpoint.start()
    yield agent_endpoint
    await agent_endpoint.stop()


def make_tree(chat: ChatTokenizer) -> ConversationTree:
    token_ids = chat.encode_completion("red")

    async def sample(*_: object) -> SampledCompletion:
        return SampledCompletion(list(token_ids), [-1.0] * len(token_ids), 0, True)

    return ConversationTree(sample, chat, LIMITS, Sampling(1.0, 16), key=0)


async def send(access: EndpointAccess, path: str, head: str, body: bytes = b"") -> dict[str, Any]:
    """Send a request without the end of its body; return the error."""
    url = httpx.URL(access.base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {access.api_key}"]
    writer.write("\r\n".join([*lines, head, "", ""]).encode() + body)
    try:
        async with asyncio.timeout(20):
            response_head = await reader.readuntil(b"\r\n\r\n")
            [size] = [
                line for line in response_head.split(b"\r\n") if line.startswith(b"content-l")
            ]
            error = json.loads(await reader.readexactly(int(size.split(b":")[1])))["error"]
            return {"status": int(response_head.split()[1]), **error}
    finally:
        writer.close()


@pytest.mark.parametrize("path", PATHS)
async def test_too_large_body_is_refused_before_it_arrives(
    endpoint: AgentEndpoint, chat: ChatTokenizer, path: str
) -> None:
    tree = make_tree(chat)
    with endpoint.open_episode(tree) as episode:
        error = await send(episode.access, path, "content-length: 3000000")
    assert (error["status"], error["code"]) == (400, "context_length_exceeded")
    assert "a body of 3000000 bytes" in error["message"]
    with pytest.raises(LimitError, match=f"rollout.max_tokens = {MAX_TOKENS}"):
        tree.refuse_if_full()


async def test_too_large_chunks_are_refused_before_the_last_one(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    chunks = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    with endpoint.open_episode(make_tree(chat)) as episode:
        head = "transfer-encoding: chunked"
        error = await send(episode.access, PATHS[0], head, chunks * 40)
    assert (error["status"], error["code"]) == (400, "context_length_exceeded")


async def test_mcp_body_is_limited_by_its_size_only(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    tree = make_tree(chat)
    with endpoint.open_episode(tree) as episode:
        head = f"content-length: {MAX_MESSAGE_BYTES + 1}"
        error = await send(episode.access, "/mcp", head)
    assert (error["status"], tree.refusal) == (413, "")


async def test_connection_serves_requests_after_a_refused_body(
    endpoint: AgentEndpoint, chat: ChatTokenizer
) -> None:
    with endpoint.open_episode(make_tree(chat)) as episode:
        headers = {"authorization": f"Bearer {episode.access.api_key}"}
        client_ports = set()
        async with httpx.AsyncClient(base_url=episode.access.base_url, headers=headers) as client:
            for content, status in (("word " * 600_000, 400), ("Where?", 200)):
                messages = [{"role": "user", "content": content}]
                response = await client.post("/chat/completions", json={"messages": messages})
                assert response.status_code == status
                stream = response.extensions["network_stream"]
                client_ports.add(stream.get_extra_info("client_addr")[1])
        assert len(client_ports) == 1


async def test_sampled_tokens_raise_the_maximum_size(chat: ChatTokenizer) -> None:
    tree = make_tree(chat)
    num_bytes = (1 << 20) + 256 * MAX_TOKENS
    tree.check_body_size(num_bytes)
    with pytest.raises(LimitError):
        tree.check_body_size(num_bytes + 1)
    await tree.respond(PolicyRequest((ChatMessage("user", "Where?"),)))
    tree.check_body_size(num_bytes + 256)

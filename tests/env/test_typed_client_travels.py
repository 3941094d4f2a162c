"""Pickled copies of typed clients."""

from __future__ import annotations

import asyncio
import pickle

from echo_env import EchoAction, EchoEnv, make_environment
from ludus.env.serving.server import EnvServer, ServerOptions


def play_with_client_and_copy(address: str) -> list[float | None]:
    """Step a client and its pickled copy; return the rewards of the copy and of the client."""
    with EchoEnv(base_url=address) as local_client:
        local_client.reset()
        with pickle.loads(pickle.dumps(local_client)) as copied_client:
            copied_client.reset()
            rewards = [
                copied_client.step(EchoAction(message="four")).reward,
                local_client.step(EchoAction(message="seven77")).reward,
            ]
            assert (copied_client.state().step_count, local_client.state().step_count) == (1, 1)
    return rewards


async def test_pickled_client_reconnects_to_the_same_server() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as server:
        assert await asyncio.to_thread(play_with_client_and_copy, server.http_address) == [0.4, 0.7]

"""A typed client that is sent to another process opens a new session there."""

from __future__ import annotations

import asyncio
import pickle

from echo_env import EchoAction, EchoEnv, make_environment
from ludus.env.serving.server import EnvServer, ServerOptions


def play_both(address: str) -> list[float | None]:
    """Return the rewards in a client's session and in the session of its pickled copy."""
    with EchoEnv(base_url=address) as local_client:
        local_client.reset()
        with pickle.loads(pickle.dumps(local_client)) as remote_client:
            remote_client.reset()
            rewards = [
                remote_client.step(EchoAction(message="four")).reward,
                local_client.step(EchoAction(message="seven77")).reward,
            ]
            assert (remote_client.state().step_count, local_client.state().step_count) == (1, 1)
    return rewards


async def test_pickled_client_reconnects_to_the_same_server() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as server:
        assert await asyncio.to_thread(play_both, server.http_address) == [0.4, 0.7]

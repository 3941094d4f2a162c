"""A typed client is sent to another process: it plays there in a session of its own."""

from __future__ import annotations

import asyncio
import pickle

from echo_env import EchoAction, EchoEnv, make_environment
from ludus.env.serving.server import EnvServer, ServerOptions


def said(address: str) -> list[float | None]:
    """What is paid in a client's session, and in that of the one that travelled."""
    with EchoEnv(base_url=address) as here:
        here.reset()
        with pickle.loads(pickle.dumps(here)) as there:
            there.reset()
            rewards = [
                there.step(EchoAction(message="four")).reward,
                here.step(EchoAction(message="seven77")).reward,
            ]
            assert (there.state().step_count, here.state().step_count) == (1, 1)
    return rewards


async def test_a_client_that_travels_connects_anew_to_the_same_server() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as up:
        assert await asyncio.to_thread(said, up.http_address) == [0.4, 0.7]

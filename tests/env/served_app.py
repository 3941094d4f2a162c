"""An ASGI application that is served on a real port in this event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn

from ludus.env.asgi.uvicorn_protocols import DirectWebSocketProtocol
from ludus.env.limits import MAX_MESSAGE_BYTES
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import make_local_host
from ludus.env.sessions.options import ServerOptions
from tests.env.counting_env import CountingEnv


def make_core(factory=CountingEnv, **options) -> SessionCore:
    """Return a session core with these server options."""
    return SessionCore(make_local_host(factory), ServerOptions(**options))


@contextlib.asynccontextmanager
async def serve_app(app, **options) -> AsyncIterator[str]:
    """Serve the application and yield its authority, for example 127.0.0.1:40123."""
    config = uvicorn.Config(
        app,
        port=0,
        loop="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        ws=DirectWebSocketProtocol,
        ws_per_message_deflate=False,
        ws_max_size=MAX_MESSAGE_BYTES,
        timeout_graceful_shutdown=1,
        **options,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    server_task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await server_task

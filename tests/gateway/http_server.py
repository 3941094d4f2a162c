"""An HTTP server for ASGI applications, in the event loop of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from ludus.env.asgi.uvicorn_protocols import BoundedHttpProtocol


@asynccontextmanager
async def serve_app(app: ASGIApp, **config: object) -> AsyncIterator[int]:
    """Serve an application with the uvicorn settings of Ludus; yield the port."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            **{  # type: ignore[arg-type]
                "lifespan": "off",
                "http": BoundedHttpProtocol,
                "ws": "websockets-sansio",
                "access_log": False,
                "timeout_keep_alive": 60,
                "log_config": None,
                **config,
            },
        )
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task

"""One address for several gateways, like a Service: a connection goes to a gateway that answers.

python -m tests.soak.balancer PORT:UPSTREAM,UPSTREAM ...
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from functools import partial

_CHUNK = 65_536


async def serve(port: int, upstreams: list[int]) -> None:
    """Forward connections until cancelled."""
    server = await asyncio.start_server(partial(_forward, upstreams), "127.0.0.1", port)
    await server.serve_forever()


async def _forward(
    upstreams: list[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    for upstream in random.sample(upstreams, len(upstreams)):
        with contextlib.suppress(OSError):
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", upstream)
            break
    else:
        writer.transport.abort()
        return
    tasks = [
        asyncio.create_task(_copy_stream(reader, upstream_writer)),
        asyncio.create_task(_copy_stream(upstream_reader, writer)),
    ]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for stream in (writer, upstream_writer):
        stream.close()  # buffered data is sent first
    await asyncio.wait(tasks)


async def _copy_stream(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await source.read(_CHUNK):
            sink.write(chunk)
            await sink.drain()


async def _serve_all(arguments: list[str]) -> None:
    async with asyncio.TaskGroup() as group:
        for argument in arguments:
            port, _, upstreams = argument.partition(":")
            group.create_task(serve(int(port), [*map(int, upstreams.split(","))]))


if __name__ == "__main__":
    asyncio.run(_serve_all(sys.argv[1:]))

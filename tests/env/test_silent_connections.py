"""Connections to a gRPC port that send no complete start are closed."""

from __future__ import annotations

import asyncio

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.serving import listeners
from tests.env.served import serve

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TIMEOUT_S = 0.3


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "HEAD_TIMEOUT_S", TIMEOUT_S)


async def read_until_closed(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(4096):
            pass
    except ConnectionResetError:
        pass


@pytest.mark.parametrize("sent", [b"", PREFACE[:5], PREFACE], ids=["nothing", "part", "preface"])
@pytest.mark.slow
async def test_a_connection_without_a_complete_start_is_closed(sent: bytes) -> None:
    async with serve() as server:
        host, port = server.grpc_address.removeprefix("grpc://").split(":")
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        for _, writer in connections:
            writer.write(sent)
        closings = [read_until_closed(reader) for reader, _ in connections]
        await asyncio.wait_for(asyncio.gather(*closings), 30)
        for _, writer in connections:
            writer.close()


@pytest.mark.slow
async def test_a_connection_with_a_complete_start_stays_open() -> None:
    async with serve() as server, await AsyncEnvClient.connect(server.grpc_address) as client:
        session, _ = await client.open(seed=1)
        await asyncio.sleep(3 * TIMEOUT_S)
        assert (await session.step({"add": 1})).step_index == 1

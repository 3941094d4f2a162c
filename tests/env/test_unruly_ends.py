"""Calls that end a worker process or never return, on every host and over every wire.

The caller gets an error code within the time limit, the slot is freed, and the next
session gets a new worker. An inline server exits with the exit code of the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from ludus.env.client import AsyncEnvClient, AsyncSession, ConnectOptions
from ludus.env.serving.server import EnvServer
from ludus.proto.errors import EnvError
from tests.env.counting_env import Misbehavior
from tests.env.misbehaving_env import (
    CRASH,
    EXIT,
    FILL_DISK,
    HANG,
    HOSTS,
    Phase,
    get_factory_and_options,
)
from tests.env.polling import limit_steps, wait_for_sessions, wait_until
from tests.env.served import WIRES, serve, server_address, start_server_process
from tests.env.test_unruly_table import NO_ERROR, Neighbor, get_http_outcome, misbehave

pytestmark = pytest.mark.slow

WORKER_HOSTS = [
    pytest.param(host, marks=[] if host == "process" else pytest.mark.long)
    for host in HOSTS
    if "isolation" in HOSTS[host][1]
]
PHASES = [phase for phase in Phase if phase is not Phase.BUILD]
CODE_BY_MISBEHAVIOR = {
    HANG: "TIMEOUT",
    EXIT: "SESSION_LOST",
    CRASH: "SESSION_LOST",
    FILL_DISK: "SESSION_LOST",
}
STEP_LIMIT_S = 2.0
DEFAULT_STEP_LIMIT_S = 60.0
MAX_CALL_S = 60.0
"""Maximum duration of a call in seconds, including calls without a step limit."""


@pytest.fixture(autouse=True)
def disable_logging() -> Iterator[None]:
    """Disable logging, because the ended workers would log hundreds of lines."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@asynccontextmanager
async def open_server(host: str, folder: Path) -> AsyncIterator[EnvServer]:
    """Start a server with a worker for each concurrent session."""
    factory, options = get_factory_and_options(folder, host)
    if "num_workers" in options:
        options = options | {"num_workers": len(PHASES) + 1}
    options = options | {"allow_write": (folder,), "disk_limit_mb": 4, "max_sessions": 16}
    async with serve(factory, **options) as server:
        yield server


async def wait_for_workers(server: EnvServer) -> None:
    """Wait until a separate worker is ready for each of the next sessions."""
    host = server.core.host
    num_workers = len(PHASES) + 1 if host.shares_workers else 1
    await wait_until(lambda: len(host.ready_workers) >= num_workers)


async def get_call_code(session: AsyncSession, phase: Phase, misbehavior: str) -> str:
    try:
        await asyncio.wait_for(misbehave(session, phase, misbehavior), MAX_CALL_S)
    except EnvError as error:
        return error.code
    return NO_ERROR


def get_expected_code(phase: Phase, misbehavior: str, wire: str) -> str:
    if phase is Phase.CLOSE:
        return NO_ERROR
    if (phase, misbehavior, wire) == (Phase.TOOL, HANG, "http"):
        return "TOOL_ERROR"  # OpenEnv's observation of a timed-out tool has no code
    return CODE_BY_MISBEHAVIOR[misbehavior]


async def collect_codes(
    server: EnvServer, client: AsyncEnvClient, misbehavior: str
) -> dict[Phase, str]:
    """Misbehave in one session per phase; return the error code for each phase."""
    await wait_for_workers(server)
    host = server.core.host
    num_ended_workers = host.num_ended_workers + len(PHASES)
    sessions = [(await client.open(seed=1))[0] for _ in PHASES]
    if misbehavior == HANG:
        limit_steps(server.core, STEP_LIMIT_S)
    calls = (
        get_call_code(session, phase, misbehavior)
        for session, phase in zip(sessions, PHASES, strict=True)
    )
    codes = await asyncio.gather(*calls)
    if host.shares_workers:  # otherwise a closing worker could end the next session
        await wait_until(lambda: host.num_ended_workers == num_ended_workers)
    limit_steps(server.core, DEFAULT_STEP_LIMIT_S)
    return dict(zip(PHASES, codes, strict=True))


@asynccontextmanager
async def open_with_neighbor(
    host: str, wire: str, folder: Path
) -> AsyncIterator[tuple[EnvServer, AsyncEnvClient, Neighbor]]:
    """Yield a server with ready workers, a client, and a session that must not be affected."""
    async with (
        open_server(host, folder) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        await wait_for_workers(server)
        session, _ = await client.open(seed=0)
        yield server, client, Neighbor(session)


async def can_play(client: AsyncEnvClient) -> bool:
    """Return True if a step in a new session has the correct result."""
    session, _ = await client.open(seed=2)
    total = (await session.step({"add": 2})).observation["total"]
    await session.close()
    return total == 2


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("host", WORKER_HOSTS)
async def test_call_that_ends_a_worker_returns_an_error_code(
    host: str, wire: str, tmp_path: Path
) -> None:
    async with open_with_neighbor(host, wire, tmp_path) as (server, client, neighbor):
        for misbehavior in CODE_BY_MISBEHAVIOR:
            codes = await collect_codes(server, client, misbehavior)
            assert (misbehavior, codes) == (
                misbehavior,
                {phase: get_expected_code(phase, misbehavior, wire) for phase in PHASES},
            )
            await wait_for_sessions(server.core, 1)
            assert await neighbor.can_step() and await can_play(client)
            await wait_for_sessions(server.core, 1)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("host", WORKER_HOSTS)
async def test_open_fails_if_the_worker_ends_during_build(
    host: str, wire: str, tmp_path: Path
) -> None:
    async with open_with_neighbor(host, wire, tmp_path) as (server, client, neighbor):
        for misbehavior, code in CODE_BY_MISBEHAVIOR.items():
            await wait_for_workers(server)
            limit_steps(server.core, STEP_LIMIT_S if misbehavior == HANG else DEFAULT_STEP_LIMIT_S)
            (tmp_path / "build").write_text(misbehavior)
            with pytest.raises(EnvError) as exc_info:
                await asyncio.wait_for(client.open(seed=1), MAX_CALL_S)
            (tmp_path / "build").unlink()
            limit_steps(server.core, DEFAULT_STEP_LIMIT_S)
            assert (misbehavior, exc_info.value.code) == (misbehavior, code)
            await wait_for_sessions(server.core, 1)
            assert await neighbor.can_step() and await can_play(client)
            await wait_for_sessions(server.core, 1)


@pytest.mark.long
@pytest.mark.parametrize("host", WORKER_HOSTS)
async def test_http_and_mcp_return_the_same_code(host: str, tmp_path: Path) -> None:
    statuses = {"TIMEOUT": 504, "SESSION_LOST": 410}
    async with (
        open_server(host, tmp_path) as server,
        httpx.AsyncClient(base_url=server.http_address, timeout=60) as http_client,
    ):
        for misbehavior, code in CODE_BY_MISBEHAVIOR.items():
            limit_steps(server.core, STEP_LIMIT_S if misbehavior == HANG else DEFAULT_STEP_LIMIT_S)
            status, reply_code, mcp_reply = await get_http_outcome(http_client, misbehavior)
            assert (misbehavior, status, reply_code) == (misbehavior, statuses[code], code)
            assert mcp_reply["error"]["data"]["code"] == code


@pytest.mark.parametrize("wire", WIRES)
async def test_inline_exit_ends_the_server(wire: str, tmp_path: Path) -> None:
    with start_server_process(tmp_path, "--unruly") as server:
        address = server_address(server, wire)
        async with await AsyncEnvClient.connect(
            address, ConnectOptions(reconnect_timeout_s=0.5)
        ) as client:
            session, _ = await client.open(seed=1)
            with pytest.raises(EnvError) as exc_info:
                await asyncio.wait_for(session.step({"add": int(Misbehavior.EXIT)}), MAX_CALL_S)
            assert exc_info.value.code in ("UNAVAILABLE", "SESSION_LOST")
        assert await asyncio.to_thread(server.process.wait) == 7


async def test_server_with_failing_workers_is_not_ready_until_recovery(tmp_path: Path) -> None:
    factory, options = get_factory_and_options(tmp_path, "pool")
    async with (
        serve(factory, **options) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
        httpx.AsyncClient(base_url=server.http_address, timeout=60) as http_client,
        asyncio.timeout(120),
    ):
        (tmp_path / "build").write_text(EXIT)
        while (response := await http_client.get("/readyz")).status_code == 200:
            with contextlib.suppress(EnvError):
                await client.open(seed=1)
        assert response.status_code == 503 and "exited with code 7" in response.json()["status"]
        (tmp_path / "build").unlink()
        while (await http_client.get("/readyz")).status_code == 503:
            await asyncio.sleep(0.05)
        session, _ = await client.open(seed=1)
        assert (await session.step({"add": 2})).observation["total"] == 2

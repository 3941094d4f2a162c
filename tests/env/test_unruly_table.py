"""Misbehavior of environments in every phase, on every host and over every wire.

Only the misbehaving session gets an error, and it can play another episode.
Another session on the same server is not affected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.proto.errors import EnvError
from tests.env.misbehaving_env import (
    HARMLESS_MISBEHAVIORS,
    HOSTS,
    RAISING_MISBEHAVIORS,
    WRONG_VALUES,
    Phase,
    get_factory_and_options,
)
from tests.env.polling import wait_for_sessions, wait_until
from tests.env.served import WIRES, serve, server_address

pytestmark = pytest.mark.slow


def list_misbehaviors(host: str) -> list[str]:
    """Return misbehaviors that must affect only the caller. Inline hosts do not support forks."""
    is_isolated = "isolation" in HOSTS[host][1]
    return [
        *RAISING_MISBEHAVIORS,
        *(
            misbehavior
            for misbehavior in HARMLESS_MISBEHAVIORS
            if is_isolated or not misbehavior.startswith("fork")
        ),
    ]


def list_rows(host: str) -> list[tuple[Phase, str]]:
    return [
        (phase, misbehavior)
        for phase in Phase
        if phase is not Phase.BUILD
        for misbehavior in (*list_misbehaviors(host), *WRONG_VALUES.get(phase, ()))
    ]


NO_ERROR = "no error"
"""Outcome of a call that succeeds."""


@pytest.fixture(autouse=True)
def disable_logging() -> Iterator[None]:
    """Disable logging, because pytest-xdist cannot send some of the errors raised here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def misbehave(session: AsyncSession, phase: Phase, misbehavior: str) -> None:
    """Make the environment of the session misbehave in the phase."""
    step_arguments = {"misbehavior": misbehavior, "phase": phase}
    match phase:
        case Phase.RESET:
            await session.reset(options=step_arguments)
        case Phase.STATE | Phase.TOOL | Phase.PARSE:
            await session.step({"add": 1, **step_arguments})
            if phase is Phase.STATE:
                await session.state()
            elif phase is Phase.TOOL:
                await session.call_tool("look", {})
            else:
                await session.step("ADD")
        case Phase.CLOSE:
            await session.step({"add": 1, **step_arguments})
            await session.close()
        case _:
            await session.step({"add": 1, **step_arguments})


class Neighbor:
    """Another session on the same server."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._total = 0

    async def can_step(self) -> bool:
        """Return True if the next step continues the episode."""
        self._total += 1
        return (await self._session.step({"add": 1})).observation["total"] == self._total


async def play_misbehavior(
    client: AsyncEnvClient, neighbor: Neighbor, phase: Phase, misbehavior: str
) -> tuple[str, str, bool]:
    """Misbehave; return the code, the next episode's total, and whether the neighbor can step."""
    session, _ = await client.open(seed=1)
    code = NO_ERROR
    try:
        await misbehave(session, phase, misbehavior)
    except EnvError as error:
        code = error.code
    next_total = "ended"
    if phase is not Phase.CLOSE:
        await session.reset(seed=1)
        next_total = str((await session.step({"add": 2})).observation["total"])
        await session.close()
    return code, next_total, await neighbor.can_step()


def get_expected_outcome(phase: Phase, misbehavior: str, wire: str) -> tuple[str, str, bool]:
    if phase is Phase.CLOSE:
        return NO_ERROR, "ended", True
    if misbehavior in HARMLESS_MISBEHAVIORS:
        return NO_ERROR, "2", True
    # OpenEnv's tool observations contain an error without a code.
    is_openenv_tool = phase is Phase.TOOL and wire == "http"
    return ("TOOL_ERROR" if is_openenv_tool else "EXECUTION_ERROR"), "2", True


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("host", HOSTS)
async def test_misbehavior_fails_only_the_affected_session(
    host: str, wire: str, tmp_path: Path
) -> None:
    factory, options = get_factory_and_options(tmp_path, host)
    async with serve(factory, **options) as server:
        address = server_address(server, wire)
        async with await AsyncEnvClient.connect(address) as client:
            session, _ = await client.open(seed=0)
            neighbor = Neighbor(session)
            outcomes = {
                row: await asyncio.wait_for(play_misbehavior(client, neighbor, *row), 60)
                for row in list_rows(host)
            }
    assert outcomes == {row: get_expected_outcome(*row, wire) for row in list_rows(host)}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("host", HOSTS)
async def test_failed_build_fails_only_the_open_call(host: str, wire: str, tmp_path: Path) -> None:
    factory, options = get_factory_and_options(tmp_path, host)
    outcomes = {}
    async with (
        serve(factory, **options) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        session, _ = await client.open(seed=0)
        neighbor = Neighbor(session)
        for misbehavior in RAISING_MISBEHAVIORS:
            (tmp_path / "build").write_text(misbehavior)
            with pytest.raises(EnvError) as exc_info:
                await asyncio.wait_for(client.open(seed=1), 60)
            (tmp_path / "build").unlink()
            outcomes[misbehavior] = (exc_info.value.code, await neighbor.can_step())
        for misbehavior in set(list_misbehaviors(host)) - set(RAISING_MISBEHAVIORS):
            (tmp_path / "build").write_text(misbehavior)
            session, _ = await asyncio.wait_for(client.open(seed=1), 60)
            (tmp_path / "build").unlink()
            await session.close()
            assert await neighbor.can_step()
        await wait_for_sessions(server.core, 1)
    assert outcomes == dict.fromkeys(RAISING_MISBEHAVIORS, ("FACTORY_ERROR", True))


async def get_http_outcome(
    http_client: httpx.AsyncClient, misbehavior: str
) -> tuple[int, str, Any]:
    """Misbehave in a step; return the status and code over HTTP, and the reply over MCP."""
    action = {"add": 1, "misbehavior": misbehavior, "phase": Phase.STEP}
    http_session_id = (await http_client.post("/reset", json={"seed": 1})).headers["x-session-id"]
    response = await http_client.post(
        "/step", json={"action": action}, headers={"x-session-id": http_session_id}
    )
    initialize_message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    mcp_session_id = (await http_client.post("/mcp", json=initialize_message)).headers[
        "mcp-session-id"
    ]
    reply: Any = None
    for name, arguments in (("start_episode", {}), ("take_action", action)):
        params = {"name": name, "arguments": arguments}
        request = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
        reply = (
            await http_client.post("/mcp", json=request, headers={"mcp-session-id": mcp_session_id})
        ).json()
    await http_client.delete("/mcp", headers={"mcp-session-id": mcp_session_id})
    await http_client.post("/close", headers={"x-session-id": http_session_id})
    return response.status_code, response.json()["detail"]["code"], reply


@pytest.mark.parametrize("host", ["event loop", "threads", "pool"])
async def test_misbehavior_has_the_same_code_over_http_and_mcp(host: str, tmp_path: Path) -> None:
    factory, options = get_factory_and_options(tmp_path, host)
    async with (
        serve(factory, **options) as server,
        httpx.AsyncClient(base_url=server.http_address, timeout=60) as http_client,
    ):
        for misbehavior in (*RAISING_MISBEHAVIORS, *WRONG_VALUES[Phase.STEP]):
            status, code, reply = await get_http_outcome(http_client, misbehavior)
            assert (misbehavior, status, code) == (misbehavior, 500, "EXECUTION_ERROR")
            result = reply["result"]
            assert result["isError"] and "EXECUTION_ERROR" in result["content"][0]["text"]


@pytest.mark.parametrize("host", ["event loop", "threads", "pool"])
async def test_call_of_a_disconnected_caller_is_cancelled(host: str, tmp_path: Path) -> None:
    factory, options = get_factory_and_options(tmp_path, host)
    async with (
        serve(factory, **options, max_sessions=1, wait_for_slot_s=600.0) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        session, _ = await client.open(seed=1)
        async with await AsyncEnvClient.connect(server.grpc_address) as other_client:
            open_task = asyncio.create_task(other_client.open(seed=2))
            await wait_until(lambda: server.core.load.num_waiting)
            open_task.cancel()
        await wait_until(lambda: not server.core.load.num_waiting)
        assert (await session.step({"add": 3})).observation["total"] == 3

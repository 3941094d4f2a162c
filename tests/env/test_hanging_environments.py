"""Calls that never return time out and free their slots, and other sessions continue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.runtime import STUCK_EXIT_CODE, Watchdog
from ludus.env.serving.server import EnvServer
from ludus.proto.errors import CallTimeoutError, EnvError, UnavailableError
from tests.env.counting_env import Misbehavior
from tests.env.misbehaving_env import HANG, Phase, get_factory_and_options
from tests.env.polling import advance_loop_clock, find_busy_sessions, wait_for_sessions, wait_until
from tests.env.served import serve, start_server_process
from tests.env.test_unruly_table import Neighbor, misbehave

CLOCK_ADVANCE_S = 61.0
PHASES = [Phase.RESET, Phase.STEP, Phase.RENDER, Phase.STATE, Phase.TOOL]


class HangingServer:
    """A server whose environments hang in the server's threads, and a client."""

    def __init__(self, folder: Path, server: EnvServer, client: AsyncEnvClient) -> None:
        self.folder, self.server, self.client = folder, server, client

    async def time_out_calls(self, *calls: asyncio.Task) -> list[EnvError]:
        """Wait until the calls hang, move the clock past their limit, and return their errors."""
        await wait_until(lambda: self.num_hung == len(calls))
        advance_loop_clock(CLOCK_ADVANCE_S)
        return await asyncio.gather(*calls, return_exceptions=True)

    @property
    def num_hung(self) -> int:
        return len(list(self.folder.glob("hung-*")))


@asynccontextmanager
async def serve_hanging_env(folder: Path, **options) -> AsyncIterator[HangingServer]:
    factory, host_options = get_factory_and_options(folder, "threads")
    async with (
        serve(factory, **{**host_options, **options}) as server,
        await AsyncEnvClient.connect(
            server.grpc_address, ConnectOptions(timeout_s=3600.0)
        ) as client,
    ):
        yield HangingServer(folder, server, client)


@pytest.mark.parametrize("phase", PHASES)
async def test_hanging_call_ends_the_session_and_frees_the_slot(
    phase: Phase, tmp_path: Path
) -> None:
    async with serve_hanging_env(tmp_path, num_threads=1, max_sessions=2) as setup:
        neighbor = Neighbor((await setup.client.open(seed=0))[0])
        session, _ = await setup.client.open(seed=1)
        (error,) = await setup.time_out_calls(asyncio.create_task(misbehave(session, phase, HANG)))
        assert isinstance(error, CallTimeoutError)
        await wait_for_sessions(setup.server.core, 1)
        assert await neighbor.can_step()
        next_session, _ = await setup.client.open(seed=2)
        assert (await next_session.step({"add": 1})).observation["total"] == 1


async def test_hanging_close_frees_the_slot(tmp_path: Path) -> None:
    async with serve_hanging_env(tmp_path, num_threads=1, max_sessions=1) as setup:
        session, _ = await setup.client.open(seed=1)
        assert await setup.time_out_calls(
            asyncio.create_task(misbehave(session, Phase.CLOSE, HANG))
        ) == [None]
        next_session, _ = await setup.client.open(seed=2)
        assert (await next_session.step({"add": 1})).observation["total"] == 1


async def test_environment_that_hangs_during_creation_frees_the_slot(tmp_path: Path) -> None:
    async with serve_hanging_env(tmp_path, num_threads=1, max_sessions=1) as setup:
        (tmp_path / "build").write_text(HANG)
        (error,) = await setup.time_out_calls(asyncio.create_task(setup.client.open(seed=1)))
        assert isinstance(error, CallTimeoutError)
        assert "not built within 60 s" in str(error)
        (tmp_path / "build").unlink()
        session, _ = await setup.client.open(seed=2)
        assert (await session.step({"add": 1})).observation["total"] == 1


async def test_call_waiting_behind_hanging_calls_does_not_time_out(tmp_path: Path) -> None:
    async with serve_hanging_env(tmp_path, num_threads=1) as setup:
        waiting_session, _ = await setup.client.open(seed=0)
        hanging_session, _ = await setup.client.open(seed=1)
        hanging_call = asyncio.create_task(misbehave(hanging_session, Phase.STEP, HANG))
        await wait_until(lambda: setup.num_hung)
        waiting_step = asyncio.create_task(waiting_session.step({"add": 1}))
        core = setup.server.core
        await wait_until(lambda: waiting_session.id in find_busy_sessions(core))
        (error,) = await setup.time_out_calls(hanging_call)
        assert isinstance(error, CallTimeoutError)
        assert (await waiting_step).observation["total"] == 1


@pytest.mark.slow
async def test_server_without_free_threads_is_not_ready_and_reports_the_reason(
    tmp_path: Path,
) -> None:
    async with (
        serve_hanging_env(tmp_path, num_threads=1) as setup,
        httpx.AsyncClient(base_url=setup.server.http_address, timeout=3600) as http,
    ):
        assert (await http.get("/readyz")).status_code == 200
        for num_hung in (1, 2):
            session, _ = await setup.client.open(seed=1)
            call = asyncio.create_task(misbehave(session, Phase.STEP, HANG))
            await wait_until(lambda num_expected=num_hung: setup.num_hung == num_expected)
            advance_loop_clock(CLOCK_ADVANCE_S)
            with pytest.raises(CallTimeoutError):
                await call
        response = await http.get("/readyz")
        assert response.status_code == 503
        assert "hang in the environment's code" in response.json()["status"]
        assert (await http.get("/healthz")).status_code == 200
        with pytest.raises(UnavailableError, match="restart the server"):
            await setup.client.open(seed=1)
        assert setup.server.core.host.is_stuck


async def test_watchdog_stops_a_stuck_process() -> None:
    end_event, unavailable_reason = threading.Event(), [""]
    reasons: list[str] = []

    def record_end(reason: str) -> None:
        reasons.append(reason)
        end_event.set()

    Watchdog(0.0, lambda: unavailable_reason[0], record_end, tick_s=0.01)
    await asyncio.sleep(0.05)
    assert reasons == []
    unavailable_reason[0] = "no thread is left"
    await wait_until(end_event.is_set)
    assert reasons == ["no thread is left"]


@pytest.mark.slow
async def test_step_that_blocks_the_event_loop_stops_the_server(tmp_path: Path) -> None:
    with start_server_process(tmp_path, "--unruly", "--step-timeout-s", "1") as server:
        async with await AsyncEnvClient.connect(server.grpc_address) as client:
            session, _ = await client.open(seed=1)
            with pytest.raises(EnvError):
                await session.step({"add": int(Misbehavior.HANG)})
        assert await asyncio.to_thread(server.process.wait) == STUCK_EXIT_CODE
        output = await asyncio.to_thread(server.process.stderr.read)
        assert "has blocked the event loop for more than 1 s" in output
        assert "in _misbehave" in output, "the output does not contain the blocking function"

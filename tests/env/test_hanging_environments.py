"""Code that never returns: its call times out, its slot is freed, and other sessions continue."""

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
from tests.env.counting_env import Deed
from tests.env.misbehaving_env import HANG, Phase, get_factory_and_options
from tests.env.polling import busy_sessions, move_loop_clock, wait_for_sessions, wait_until
from tests.env.served import serve, server_process
from tests.env.test_unruly_table import Neighbour, do_deed

BEYOND_EVERY_LIMIT_S = 61.0
PHASES = [Phase.RESET, Phase.STEP, Phase.RENDER, Phase.STATE, Phase.TOOL]


class Served:
    """A server whose environments hang in its threads."""

    def __init__(self, folder: Path, server: EnvServer, client: AsyncEnvClient) -> None:
        self.folder, self.server, self.client = folder, server, client

    async def hang(self, *calls: asyncio.Task) -> list[EnvError]:
        """Return the errors of the calls after their time limit."""
        await wait_until(lambda: self.num_hung == len(calls))
        move_loop_clock(BEYOND_EVERY_LIMIT_S)
        return await asyncio.gather(*calls, return_exceptions=True)

    @property
    def num_hung(self) -> int:
        return len(list(self.folder.glob("hung-*")))


@asynccontextmanager
async def hanging(folder: Path, **options) -> AsyncIterator[Served]:
    factory, host_options = get_factory_and_options(folder, "threads")
    async with (
        serve(factory, **{**host_options, **options}) as server,
        await AsyncEnvClient.connect(
            server.grpc_address, ConnectOptions(timeout_s=3600.0)
        ) as client,
    ):
        yield Served(folder, server, client)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_call_that_hangs_ends_its_session_and_frees_its_place(
    phase: Phase, tmp_path: Path
) -> None:
    async with hanging(tmp_path, num_threads=1, max_sessions=2) as served:
        neighbour = Neighbour((await served.client.open(seed=0))[0])
        session, _ = await served.client.open(seed=1)
        (errors,) = await served.hang(asyncio.create_task(do_deed(session, phase, HANG)))
        assert isinstance(errors, CallTimeoutError)
        await wait_for_sessions(served.server.core, 1)
        assert await neighbour.can_step()
        next_session, _ = await served.client.open(seed=2)
        assert (await next_session.step({"add": 1})).observation["total"] == 1


async def test_a_close_that_hangs_frees_its_place(tmp_path: Path) -> None:
    async with hanging(tmp_path, num_threads=1, max_sessions=1) as served:
        session, _ = await served.client.open(seed=1)
        assert await served.hang(asyncio.create_task(do_deed(session, Phase.CLOSE, HANG))) == [None]
        next_session, _ = await served.client.open(seed=2)
        assert (await next_session.step({"add": 1})).observation["total"] == 1


async def test_an_environment_that_hangs_while_it_is_built_frees_its_place(tmp_path: Path) -> None:
    async with hanging(tmp_path, num_threads=1, max_sessions=1) as served:
        (tmp_path / "build").write_text(HANG)
        (errors,) = await served.hang(asyncio.create_task(served.client.open(seed=1)))
        assert isinstance(errors, CallTimeoutError)
        assert "not built within 60 s" in str(errors)
        (tmp_path / "build").unlink()
        session, _ = await served.client.open(seed=2)
        assert (await session.step({"add": 1})).observation["total"] == 1


async def test_call_waiting_behind_hanging_calls_does_not_time_out(tmp_path: Path) -> None:
    async with hanging(tmp_path, num_threads=1) as served:
        innocent, _ = await served.client.open(seed=0)
        guilty, _ = await served.client.open(seed=1)
        hung = asyncio.create_task(do_deed(guilty, Phase.STEP, HANG))
        await wait_until(lambda: served.num_hung)
        waiting = asyncio.create_task(innocent.step({"add": 1}))
        core = served.server.core
        await wait_until(lambda: innocent.id in busy_sessions(core))
        (errors,) = await served.hang(hung)
        assert isinstance(errors, CallTimeoutError)
        assert (await waiting).observation["total"] == 1


async def test_a_server_without_a_thread_left_is_not_ready_and_says_why(tmp_path: Path) -> None:
    async with (
        hanging(tmp_path, num_threads=1) as served,
        httpx.AsyncClient(base_url=served.server.http_address, timeout=3600) as http,
    ):
        assert (await http.get("/readyz")).status_code == 200
        for num_hung in (1, 2):
            session, _ = await served.client.open(seed=1)
            call = asyncio.create_task(do_deed(session, Phase.STEP, HANG))
            await wait_until(lambda expected=num_hung: served.num_hung == expected)
            move_loop_clock(BEYOND_EVERY_LIMIT_S)
            with pytest.raises(CallTimeoutError):
                await call
        answer = await http.get("/readyz")
        assert answer.status_code == 503
        assert "hang in the environment's code" in answer.json()["status"]
        assert (await http.get("/healthz")).status_code == 200
        with pytest.raises(UnavailableError, match="restart the server"):
            await served.client.open(seed=1)
        assert served.server.core.host.is_stuck


async def test_watchdog_stops_a_stuck_process() -> None:
    ended, unavailable_reason = threading.Event(), [""]
    errors: list[str] = []

    def end(reason: str) -> None:
        errors.append(reason)
        ended.set()

    Watchdog(0.0, lambda: unavailable_reason[0], end, tick_s=0.01)
    await asyncio.sleep(0.05)
    assert errors == []
    unavailable_reason[0] = "no thread is left"
    await wait_until(ended.is_set)
    assert errors == ["no thread is left"]


@pytest.mark.slow
async def test_step_that_blocks_the_event_loop_stops_the_server(tmp_path: Path) -> None:
    with server_process(tmp_path, "--unruly", "--step-timeout-s", "1") as server:
        async with await AsyncEnvClient.connect(server.grpc_address) as client:
            session, _ = await client.open(seed=1)
            with pytest.raises(EnvError):
                await session.step({"add": int(Deed.HANG)})
        assert await asyncio.to_thread(server.process.wait) == STUCK_EXIT_CODE
        output = await asyncio.to_thread(server.process.stderr.read)
        assert "has blocked the event loop for more than 1 s" in output
        assert "in _misbehave" in output, "it shows where"

"""Sessions in worker processes are isolated from each other."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.encoding import ResetArgs
from ludus.env.serving.server import EnvServer
from ludus.env.sessions.interface import OpenArgs
from ludus.env.workers.host import WorkerHost
from ludus.proto.errors import (
    CallTimeoutError,
    CapacityError,
    ConfigError,
    EnvError,
    ErrorCode,
    ExecutionError,
    InfrastructureError,
    SessionLostError,
)
from tests.env.counting_env import (
    Gate,
    Misbehavior,
    UnrulyEnv,
    UnrulyThreadedEnv,
    exit_during_creation,
    exit_on_second_creation,
    fail_during_creation,
)
from tests.env.polling import advance_loop_clock, limit_steps, wait_until
from tests.env.processes import is_alive, list_child_pids
from tests.env.served import serve, server_address, start_server_process

pytestmark = pytest.mark.slow

ISOLATIONS = ("pool", "process")
REPORT_ACTION = {"add": int(Misbehavior.REPORT)}
ADD_1 = {"add": 1}
NUM_WORKERS = 3


@pytest.fixture(params=ISOLATIONS)
def isolation(request):
    return request.param


def serve_workers(factory: Any = UnrulyEnv, isolation: str = "pool", **options: Any) -> EnvServer:
    if isolation == "pool":
        options.setdefault("num_workers", NUM_WORKERS)
    return serve(factory, isolation=isolation, **options)


@asynccontextmanager
async def connect_to(server: EnvServer, wire: str = "grpc") -> AsyncIterator[AsyncEnvClient]:
    client = await AsyncEnvClient.connect(server_address(server, wire))
    try:
        yield client
    finally:
        await client.close()


def get_host(server: EnvServer) -> WorkerHost:
    host = server.core.host
    assert isinstance(host, WorkerHost)
    return host


async def open_sessions(client: AsyncEnvClient, num_sessions: int) -> list[Any]:
    results = await asyncio.gather(*(client.open(seed=seed) for seed in range(num_sessions)))
    return [session for session, _ in results]


async def read_worker_pid(session: Any) -> int:
    return (await session.step(REPORT_ACTION)).info["pid"]


async def group_by_worker(sessions: list[Any]) -> dict[int, list[Any]]:
    """Group the sessions by the process id of their worker."""
    sessions_by_pid: dict[int, list[Any]] = {}
    for session, pid in zip(
        sessions, await asyncio.gather(*map(read_worker_pid, sessions)), strict=True
    ):
        sessions_by_pid.setdefault(pid, []).append(session)
    return sessions_by_pid


async def assert_only_lost(
    lost_sessions: list[Any],
    other_sessions: list[Any],
    message: str,
    error: type[EnvError] = SessionLostError,
) -> None:
    for session in lost_sessions:
        with pytest.raises(error, match=message) as error_info:
            await session.step(ADD_1)
        assert isinstance(error_info.value, InfrastructureError)
    results = await asyncio.gather(*(session.step(ADD_1) for session in other_sessions))
    assert [result.reward for result in results] == [1.0] * len(other_sessions)


# -- exits and limits ------------------------------------------------------------------


async def test_killed_worker_loses_only_sessions_on_that_worker_and_is_replaced(
    isolation: str,
) -> None:
    async with (
        serve_workers(isolation=isolation, max_sessions=33) as server,
        connect_to(server) as client,
    ):
        sessions = await open_sessions(client, 33)
        sessions_by_pid = await group_by_worker(sessions)
        assert len(sessions_by_pid) == (NUM_WORKERS if isolation == "pool" else 33)
        pid, lost_sessions = next(iter(sessions_by_pid.items()))
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: server.core.load.num_sessions == 33 - len(lost_sessions))
        other_sessions = [candidate for candidate in sessions if candidate not in lost_sessions]
        await assert_only_lost(lost_sessions, other_sessions, "its worker was killed by SIGKILL")
        new_sessions = await open_sessions(client, len(lost_sessions))
        assert pid not in await group_by_worker(new_sessions)
        with pytest.raises(CapacityError):
            await client.open()
        if isolation == "pool":
            await wait_until(lambda: len(get_host(server).pids) == NUM_WORKERS)


@pytest.mark.parametrize(
    ("misbehavior", "message"),
    [
        (Misbehavior.CRASH, "its worker was killed by SIGSEGV"),
        (Misbehavior.EXIT, "its worker exited with code 7"),
        (
            Misbehavior.EXCEED_MEMORY_LIMIT,
            r"of memory, more than its limit of 300 MB \(memory_limit_mb\)",
        ),
    ],
)
async def test_step_that_ends_the_worker_process_reports_the_cause(
    isolation: str, misbehavior, message: str
) -> None:
    async with (
        serve_workers(isolation=isolation, memory_limit_mb=300) as server,
        connect_to(server) as client,
    ):
        sessions_by_pid = await group_by_worker(await open_sessions(client, 6))
        faulty_session, *peer_sessions = next(iter(sessions_by_pid.values()))
        other_sessions = [
            candidate for pid, group in sessions_by_pid.items() for candidate in group
        ]
        other_sessions = [
            candidate
            for candidate in other_sessions
            if candidate not in (faulty_session, *peer_sessions)
        ]
        with pytest.raises(SessionLostError, match=message) as error_info:
            await faulty_session.step({"add": int(misbehavior)})
        assert isinstance(error_info.value, InfrastructureError)
        await assert_only_lost(peer_sessions, other_sessions, message)
        assert (await (await client.open(seed=1))[0].step(ADD_1)).reward == 1.0


@pytest.mark.parametrize("factory", [UnrulyEnv, UnrulyThreadedEnv])
async def test_hanging_step_ends_only_the_worker_that_runs_the_step(
    isolation: str, factory
) -> None:
    async with serve_workers(factory, isolation) as server, connect_to(server) as client:
        sessions_by_pid = await group_by_worker(await open_sessions(client, 6))
        faulty_session, *peer_sessions = next(iter(sessions_by_pid.values()))
        other_sessions = [
            candidate for group in list(sessions_by_pid.values())[1:] for candidate in group
        ]
        limit_steps(server.core, 0.5)
        with pytest.raises(CallTimeoutError, match=r"longer than 0\.5 s") as error_info:
            await faulty_session.step({"add": int(Misbehavior.HANG)})
        assert error_info.value.code is ErrorCode.TIMEOUT
        limit_steps(server.core, 60)
        await wait_until(lambda: server.core.load.num_sessions == len(other_sessions))
        await assert_only_lost(peer_sessions, other_sessions, r"a step took longer than 0\.5 s")
        await wait_until(lambda: not is_alive(next(iter(sessions_by_pid))))


async def test_hanging_first_reset_ends_the_worker_and_frees_the_slot(isolation: str) -> None:
    async with serve_workers(isolation=isolation) as server:
        host = get_host(server)
        open_args = OpenArgs(ResetArgs(options={"start": int(Misbehavior.HANG)}))
        open_task = asyncio.create_task(server.core.open(open_args))
        await wait_until(lambda: any(worker.has_opened for worker in host.live_workers))
        advance_loop_clock(61)
        with pytest.raises(CallTimeoutError, match="the first reset did not finish within 60 s"):
            await open_task
        assert server.core.load.num_sessions == 0
        await wait_until(lambda: host.num_ended_workers == 1)
        assert (await server.core.open(OpenArgs(ResetArgs()))).first_result is not None


async def test_cpu_time_beyond_the_limit_ends_the_session() -> None:
    async with (
        serve_workers(isolation="process", cpu_limit_s=1) as server,
        connect_to(server) as client,
    ):
        faulty_session, other_session = await open_sessions(client, 2)
        with pytest.raises(SessionLostError, match="used up its 1 s of CPU time"):
            await faulty_session.step({"add": int(Misbehavior.SPIN)})
        assert (await other_session.step(ADD_1)).reward == 1.0


async def test_sys_exit_in_a_step_raises_execution_error(isolation: str) -> None:
    async with serve_workers(isolation=isolation) as server, connect_to(server) as client:
        (session,) = await open_sessions(client, 1)
        with pytest.raises(ExecutionError, match="SystemExit"):
            await session.step({"add": int(Misbehavior.SYS_EXIT)})
        assert (await session.step(ADD_1)).reward == 1.0


async def test_child_processes_end_when_the_worker_is_killed(isolation: str) -> None:
    async with serve_workers(isolation=isolation) as server, connect_to(server) as client:
        (session,) = await open_sessions(client, 1)
        worker_pid = await read_worker_pid(session)
        await session.step({"add": int(Misbehavior.START_CHILD)})
        (child_pid,) = list_child_pids(worker_pid)
        assert is_alive(child_pid)
        os.kill(worker_pid, signal.SIGKILL)
        await wait_until(lambda: not is_alive(child_pid))
        with pytest.raises(SessionLostError, match="SIGKILL"):
            await session.step(ADD_1)


async def test_client_time_limit_ends_only_the_session_that_exceeds_the_limit() -> None:
    async with (
        serve_workers(UnrulyThreadedEnv, num_workers=1, step_timeout_s=30) as server,
        connect_to(server) as client,
    ):
        (other_session,) = await open_sessions(client, 1)
        core = server.core
        hasty_session = await core.open(OpenArgs(ResetArgs()))
        with pytest.raises(CallTimeoutError):
            await core.step(hasty_session.session_id, b'{"add": 99}', 1, timeout_s=0.05)
        assert (await other_session.step(ADD_1)).reward == 1.0
        assert core.load.num_sessions == 1


async def test_slow_environment_in_a_pool_delays_no_other_session(gate: Gate) -> None:
    async with (
        serve_workers(gate.factory, num_workers=1, allow_write=(gate.folder,)) as server,
        connect_to(server) as client,
    ):
        slow_session, quick_session = await open_sessions(client, 2)
        slow_step = asyncio.create_task(slow_session.step({"add": 98}))
        await wait_until(lambda: gate.num_entered)
        for _ in range(3):
            await quick_session.step(ADD_1)
        assert not slow_step.done()
        gate.open()
        assert (await slow_step).reward == 98.0


async def test_sessions_survive_the_death_of_the_fork_server(isolation: str) -> None:
    async with serve_workers(isolation=isolation) as server, connect_to(server) as client:
        sessions = await open_sessions(client, 4)
        fork_server_pid = get_host(server).fork_server.pid
        os.kill(fork_server_pid, signal.SIGKILL)
        await wait_until(lambda: not is_alive(fork_server_pid))
        results = await asyncio.gather(*(session.step(ADD_1) for session in sessions))
        assert [result.reward for result in results] == [1.0] * 4
        orphan_pid = await read_worker_pid(sessions[0])
        os.kill(orphan_pid, signal.SIGKILL)
        with pytest.raises(SessionLostError, match="its worker ended"):
            await sessions[0].step(ADD_1)
        new_sessions = await open_sessions(client, 8)
        assert orphan_pid not in await group_by_worker(new_sessions)
        pids = get_host(server).pids
    await wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.long
async def test_open_succeeds_when_the_fork_server_dies(isolation: str) -> None:
    async with serve_workers(isolation=isolation) as server, connect_to(server) as client:
        host = get_host(server)
        await open_sessions(client, 1)
        fork_server_pid = host.fork_server.pid
        os.kill(fork_server_pid, signal.SIGSTOP)  # it receives requests but cannot process them
        killed_pids = host.pids if isolation == "pool" else []  # idle workers could serve the opens
        for pid in killed_pids:
            os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: host.worker_counts.num_ended_workers == len(killed_pids))
        open_task = asyncio.create_task(open_sessions(client, 8))
        await wait_until(lambda: any(worker.sessions for worker in host.live_workers))
        os.kill(fork_server_pid, signal.SIGKILL)
        sessions = await asyncio.wait_for(open_task, 60)
        results = await asyncio.gather(*(session.step(ADD_1) for session in sessions))
        assert [result.reward for result in results] == [1.0] * 8


# -- slots -----------------------------------------------------------------------------


async def test_all_slots_are_free_after_200_opens_and_killed_workers(isolation: str) -> None:
    generator = random.Random(0)
    max_sessions = 12
    async with (
        serve_workers(isolation=isolation, max_sessions=max_sessions) as server,
        connect_to(server) as client,
    ):
        host = get_host(server)

        async def open_and_close(seed: int) -> None:
            with contextlib.suppress(InfrastructureError, CapacityError, ExecutionError):
                args = OpenArgs(ResetArgs(seed=seed) if seed % 3 else None)
                session = await server.core.open(args)
                for _ in range(generator.randrange(3)):
                    await server.core.state(session.session_id)
                await server.core.close(session.session_id)

        async def kill_workers() -> None:
            while True:
                await asyncio.sleep(0.02)
                pids = [pid for pid in host.pids if is_alive(pid)]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(generator.choice(pids or [0]), signal.SIGKILL) if pids else None

        kill_task = asyncio.create_task(kill_workers())
        for batch in range(10):
            await asyncio.gather(*(open_and_close(batch * 20 + index) for index in range(20)))
        kill_task.cancel()
        await wait_until(lambda: server.core.load.num_sessions == 0)
        assert host.num_ended_workers > 0
        await wait_until(lambda: all(not worker.sessions for worker in host.live_workers))
        sessions: list[Any] = []
        while len(sessions) < max_sessions:
            # A killed worker may still count as available.
            with contextlib.suppress(InfrastructureError, ExecutionError):
                sessions += await open_sessions(client, 1)
        assert server.core.load.num_sessions == max_sessions
        await asyncio.gather(*(session.step(ADD_1) for session in sessions))


async def test_factory_that_kills_its_worker_is_reported_and_retried_slowly(
    isolation: str, tmp_path: Path
) -> None:
    factory = partial(exit_on_second_creation, folder=str(tmp_path))
    async with (
        serve_workers(factory, isolation, allow_write=(tmp_path,)) as server,
        connect_to(server) as client,
    ):
        host = get_host(server)
        worker_pids: set[int] = set()
        factory_errors: list[EnvError] = []
        deadline_s = time.monotonic() + 1.5
        # The first worker may take longer on a busy machine.
        while time.monotonic() < deadline_s or not factory_errors:
            with contextlib.suppress(asyncio.TimeoutError):
                with pytest.raises(EnvError) as error_info:
                    await client.open(seed=1)
                if error_info.value.code is ErrorCode.FACTORY_ERROR:
                    factory_errors.append(error_info.value)
            worker_pids.update(host.pids)
            await asyncio.sleep(0.005)
        assert server.core.load.num_sessions == 0
        assert "exited with code 3" in factory_errors[-1].message
        assert len(worker_pids) < 40


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (fail_during_creation, "RuntimeError: no luck"),
        (exit_during_creation, "its worker exited with code 3"),
    ],
)
async def test_server_does_not_start_if_the_environment_cannot_be_created(
    factory, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await serve_workers(factory).start()


async def test_memory_limit_below_initial_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_limit_mb must be at least"):
        await serve_workers(memory_limit_mb=20).start()


# -- shutdown --------------------------------------------------------------------------


async def test_stopped_server_leaves_no_process_even_if_a_step_hangs(isolation: str) -> None:
    server = serve_workers(isolation=isolation)
    await server.start()
    async with connect_to(server) as client:
        sessions = await open_sessions(client, 4)
        host = get_host(server)
        pids = [host.fork_server.pid, *host.pids]
        hanging_step = asyncio.create_task(sessions[0].step({"add": int(Misbehavior.HANG)}))
        await asyncio.sleep(0.05)
        start_s = time.monotonic()
        await server.stop()
        assert time.monotonic() - start_s < 60.0
        await wait_until(lambda: not any(map(is_alive, pids)))
        with pytest.raises(EnvError):
            await hanging_step


async def test_a_killed_server_leaves_no_process(isolation: str, tmp_path: Path) -> None:
    arguments = ("--unruly", "--isolation", isolation, "--no-determinism-check")
    with start_server_process(tmp_path, *arguments) as server:
        client = await AsyncEnvClient.connect(server.grpc_address)
        sessions = await open_sessions(client, 3)
        pids = [await read_worker_pid(session) for session in sessions]
        hanging_step = asyncio.create_task(sessions[0].step({"add": int(Misbehavior.HANG)}))
        await asyncio.sleep(0.05)
        server.process.kill()
        server.process.wait()
        await wait_until(lambda: not any(map(is_alive, pids)))
        with pytest.raises(InfrastructureError):
            await hanging_step
        await client.close()


async def test_terminal_interrupt_does_not_reach_workers(isolation: str, tmp_path: Path) -> None:
    arguments = ("--unruly", "--isolation", isolation)
    with start_server_process(tmp_path, *arguments) as server:
        client = await AsyncEnvClient.connect(server.grpc_address)
        (session,) = await open_sessions(client, 1)
        pid = await read_worker_pid(session)
        assert os.getpgid(pid) != os.getpgid(server.process.pid)
        assert os.getsid(pid) != os.getsid(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        await wait_until(lambda: not is_alive(pid))
        assert "Traceback" not in server.process.stderr.read()
        await client.close()

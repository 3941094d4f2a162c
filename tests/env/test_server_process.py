"""The server as a process: ready file, ports, signals, and the effects of a kill."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import httpx
import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.security.session_ids import SessionKey
from ludus.env.serving.server import ServerOptions
from ludus.env.serving.subprocess import LocalServer
from ludus.proto.errors import (
    ConfigError,
    ErrorCode,
    PortInUseError,
    SessionLostError,
    UnavailableError,
)
from tests.env.counting_env import CountingEnv
from tests.env.raw_stream import RawStream
from tests.env.served import WIRES, fixed_port_arguments, serve, server_address, server_process

WAITS_FOR_ONE = "waiting for 1 sessions"
pytestmark = pytest.mark.slow

SERVER = str(Path(__file__).with_name("counting_env.py"))


def run_to_its_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SERVER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("wire", WIRES)
def test_client_recovers_after_a_killed_server(tmp_path: Path, wire: str) -> None:
    async def story():
        ports = fixed_port_arguments()
        with server_process(tmp_path, *ports) as first:
            address = server_address(first, wire)
            client = await AsyncEnvClient.connect(address, ConnectOptions(reconnect_timeout_s=300))
            session, _ = await client.open(seed=1)
            assert (await session.step({"add": 1})).reward == 1.0
            first.process.kill()
            first.process.wait()
            with pytest.raises(SessionLostError):
                await session.step({"add": 1})
            opening = asyncio.create_task(client.open(seed=1))
            await asyncio.sleep(0.2)
            assert not opening.done()
            with server_process(tmp_path, *ports):
                again, _ = await asyncio.wait_for(opening, 300)
                assert (await again.step({"add": 1})).step_index == 1
                with pytest.raises(SessionLostError):
                    await session.step({"add": 1})
                await client.close()

    asyncio.run(story())


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_at_once_with_sessions_open(tmp_path: Path, signal_number) -> None:
    async def story():
        with server_process(tmp_path) as served:
            clients = [await AsyncEnvClient.connect(server_address(served, wire)) for wire in WIRES]
            for client in clients:
                await client.open()
            begun_s = time.monotonic()
            served.process.send_signal(signal_number)
            code = await asyncio.to_thread(served.process.wait, 60)
            assert (code, time.monotonic() - begun_s < 30.0) == (0, True)
            assert list(tmp_path.iterdir()) == []
            assert "Traceback" not in served.process.stderr.read()
            for client in clients:
                await client.close()

    asyncio.run(story())


def test_sigterm_drains_the_server(tmp_path: Path) -> None:
    async def story():
        with server_process(tmp_path, "--drain-grace-s", "60") as served:
            async with await AsyncEnvClient.connect(served.grpc_address) as client:
                session, _ = await client.open(seed=1)
                served.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(read_until, served.process.stderr, WAITS_FOR_ONE)
                with pytest.raises(UnavailableError) as refused:
                    await client.open()
                assert refused.value.code is ErrorCode.DRAINING
                assert (await session.step({"add": 1})).reward == 1.0
                await session.close()
                assert await asyncio.to_thread(served.process.wait, 60) == 0

    asyncio.run(story())


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_draining_server_ends_at_a_second_signal_or_after_its_grace(
    tmp_path: Path, second
) -> None:
    async def story():
        with server_process(tmp_path, "--drain-grace-s", "60") as patient:
            async with await AsyncEnvClient.connect(patient.grpc_address) as client:
                await client.open()
                patient.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(
                    read_until, patient.process.stderr, "waiting for 1 sessions"
                )
                assert patient.process.poll() is None
                patient.process.send_signal(second)
                assert await asyncio.to_thread(patient.process.wait, 60) == 0
        with server_process(tmp_path, "--drain-grace-s", "0.2") as hasty:
            async with await AsyncEnvClient.connect(hasty.grpc_address) as client:
                await client.open()
                hasty.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(hasty.process.wait, 60) == 0

    asyncio.run(story())


def read_until(lines, words: str) -> None:
    while words not in (line := lines.readline()):
        assert line, "the process has ended"


def test_a_port_in_use_is_named_and_nothing_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        http = run_to_its_end("--port", port, "--grpc-port", "0")
        grpc = run_to_its_end("--port", "0", "--grpc-port", port)
    for ended, name in ((http, "port"), (grpc, "grpc_port")):
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"error: {name} {port} is in use on ")
        assert ended.stderr.count("\n") == 1


def test_two_servers_never_share_a_grpc_port() -> None:
    async def story():
        async with serve() as server:
            port = int(server.grpc_address.rpartition(":")[2])
            with pytest.raises(PortInUseError, match=str(port)):
                await serve(grpc_port=port).start()

    asyncio.run(story())


def test_listening_beyond_this_machine_needs_a_token() -> None:
    ended = run_to_its_end("--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 2
    assert "listening on 0.0.0.0" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ServerOptions(host="0.0.0.0", insecure=True).token is None
    assert ServerOptions(host="0.0.0.0", token="t").host == "0.0.0.0"


def test_token_comes_from_the_environment_variable(tmp_path: Path) -> None:
    with server_process(tmp_path, "--token-env", "MY_TOKEN", env={"MY_TOKEN": "t"}) as served:
        call = urllib.request.Request(
            served.http_address + "/metadata", headers={"authorization": "Bearer t"}
        )
        with urllib.request.urlopen(call, timeout=60) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 60_000}, "grpc_port must be between 0 and 65535, got 70000"),
        ({"port": -1}, "port: expected at least 0, got -1"),
        ({"max_sessions": 0}, "max_sessions: expected at least 1, got 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**options)


def test_adjacent_ports_have_adjacent_grpc_ports() -> None:
    assert [ServerOptions(port=port).requested_grpc_port for port in (8004, 8005)] == [18004, 18005]
    assert ServerOptions(port=0).requested_grpc_port == 0
    assert CountingEnv.steps_on_event_loop


# -- options ---------------------------------------------------------------------------

KEY = "a-key-that-a-gateway-and-a-server-share"


def open_signed(address: str, session_id: str) -> str:
    async def open_it() -> str:
        async with RawStream(address) as raw:
            return await asyncio.wait_for(raw.open(session_id=session_id), 60)

    return asyncio.run(open_it())


@pytest.mark.parametrize("isolation", ["inline", "pool", "process"])
def test_the_options_of_the_command_line_reach_the_server(tmp_path: Path, isolation: str) -> None:
    async def story():
        arguments = ["--isolation", isolation, "--first-seed", "7", "--max-sessions", "4"]
        arguments += ["--no-determinism-check"] if isolation == "pool" else []
        env = {"LUDUS_SESSION_KEY": KEY, "POD_UID": "8c5f7a3e-0b1d"}
        with server_process(tmp_path, *arguments, env=env) as served:
            client = await AsyncEnvClient.connect(served.grpc_address)
            described = await client.describe()
            assert (described.server_id, described.max_sessions) == ("8c5f7a3e0b1d", 4)
            assert described.is_deterministic is (isolation != "pool")
            unseeded = [(await client.open())[1].observation for _ in range(2)]
            seeded = (await client.open(seed=7))[1].observation
            assert seeded == unseeded[0] != unseeded[1]
            signed = SessionKey(KEY.encode()).sign("counting", described.server_id)
            assert await asyncio.to_thread(open_signed, served.grpc_address, signed) == signed
            await client.close()

    asyncio.run(story())


def test_options_that_cannot_work_together_end_with_one_line_and_code_2() -> None:
    ended = run_to_its_end("--port", "0", "--isolation", "pool", "--cpu-limit-s", "5")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: cpu_limit_s needs isolation='process'")
    assert ended.stderr.count("\n") == 1


def test_an_environment_that_cannot_be_built_in_a_worker_ends_with_one_line_and_code_2() -> None:
    command = [sys.executable, "-m", "ludus.env", "counting_env:fail_to_be_built"]
    ended = subprocess.run(
        [*command, "--port", "0", "--isolation", "process"],
        cwd=Path(SERVER).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "RuntimeError: no luck" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_pool_answers_opens_that_wait_for_a_free_session(tmp_path: Path) -> None:
    async def story():
        arguments = ("--isolation", "pool", "--max-sessions", "1", "--wait-for-slot-s", "60")
        with server_process(tmp_path, *arguments) as served:
            client = await AsyncEnvClient.connect(served.grpc_address)
            first, _ = await client.open()
            waiting = asyncio.create_task(client.open(seed=1))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await first.close()
            assert (await (await waiting)[0].step({"add": 1})).reward == 1.0
            await client.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("target", "isolation", "has_workers"),
    [
        ("counting_env:LonelyCountingEnv", None, True),
        ("counting_env:LonelyCountingEnv", "inline", False),
        ("counting_env:CountingEnv", None, False),
    ],
)
def test_environments_that_need_a_process_get_one_by_default(
    monkeypatch, target, isolation: str, has_workers
) -> None:
    monkeypatch.chdir(Path(SERVER).parent)
    with LocalServer(target, isolation=isolation, max_sessions=2) as server:
        metrics = httpx.get(f"{server.addresses.http}/metrics", timeout=60).text
        assert ("env_server_workers" in metrics) is has_workers


def test_a_local_server_passes_on_isolation_arguments_and_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(SERVER).parent)
    server = LocalServer(
        "counting_env:CountingEnv",
        isolation="process",
        extra_arguments=["--memory-limit-mb", "900"],
        extra_variables={"LUDUS_SESSION_KEY": KEY},
    )
    with server:
        arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
        assert arguments[arguments.index(b"--isolation") + 1] == b"process"
        assert KEY not in repr(server) and not any(
            KEY.encode() in argument for argument in arguments
        )
        assert server.addresses is not None
        signed = SessionKey(KEY.encode()).sign("counting", "elsewhere")
        with pytest.raises(AssertionError, match="belongs to another server"):
            open_signed(server.addresses.grpc, signed)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for orphans is Linux's")
def test_server_exits_if_its_parent_is_already_dead() -> None:
    starter = subprocess.Popen([sys.executable, "-c", ""])
    starter.wait()
    command = [sys.executable, "-m", "ludus.env", "counting_env:CountingEnv", "--port", "0"]
    ended = subprocess.run(
        [*command, "--exit-with-parent", str(starter.pid)],
        cwd=Path(SERVER).parent,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr

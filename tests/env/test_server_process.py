"""Server processes: signals, ports, command-line options, secrets and kills."""

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
from tests.env.served import (
    WIRES,
    make_fixed_port_arguments,
    serve,
    server_address,
    start_server_process,
)

WAIT_MESSAGE = "waiting for 1 sessions"
pytestmark = pytest.mark.slow

SERVER_PATH = str(Path(__file__).with_name("counting_env.py"))


def run_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SERVER_PATH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("wire", WIRES)
def test_client_recovers_after_a_killed_server(tmp_path: Path, wire: str) -> None:
    async def run_scenario():
        ports = make_fixed_port_arguments()
        with start_server_process(tmp_path, *ports) as server:
            address = server_address(server, wire)
            client = await AsyncEnvClient.connect(address, ConnectOptions(reconnect_timeout_s=300))
            session, _ = await client.open(seed=1)
            assert (await session.step({"add": 1})).reward == 1.0
            server.process.kill()
            server.process.wait()
            with pytest.raises(SessionLostError):
                await session.step({"add": 1})
            open_task = asyncio.create_task(client.open(seed=1))
            await asyncio.sleep(0.2)
            assert not open_task.done()
            with start_server_process(tmp_path, *ports):
                new_session, _ = await asyncio.wait_for(open_task, 300)
                assert (await new_session.step({"add": 1})).step_index == 1
                with pytest.raises(SessionLostError):
                    await session.step({"add": 1})
                await client.close()

    asyncio.run(run_scenario())


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_server_immediately_with_open_sessions(
    tmp_path: Path, signal_number
) -> None:
    async def run_scenario():
        with start_server_process(tmp_path) as server:
            clients = [await AsyncEnvClient.connect(server_address(server, wire)) for wire in WIRES]
            for client in clients:
                await client.open()
            start_s = time.monotonic()
            server.process.send_signal(signal_number)
            exit_code = await asyncio.to_thread(server.process.wait, 60)
            assert (exit_code, time.monotonic() - start_s < 30.0) == (0, True)
            assert list(tmp_path.iterdir()) == []
            assert "Traceback" not in server.process.stderr.read()
            for client in clients:
                await client.close()

    asyncio.run(run_scenario())


def test_sigterm_drains_the_server(tmp_path: Path) -> None:
    async def run_scenario():
        with start_server_process(tmp_path, "--drain-grace-s", "60") as server:
            async with await AsyncEnvClient.connect(server.grpc_address) as client:
                session, _ = await client.open(seed=1)
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(wait_for_line, server.process.stderr, WAIT_MESSAGE)
                with pytest.raises(UnavailableError) as exc_info:
                    await client.open()
                assert exc_info.value.code is ErrorCode.DRAINING
                assert (await session.step({"add": 1})).reward == 1.0
                await session.close()
                assert await asyncio.to_thread(server.process.wait, 60) == 0

    asyncio.run(run_scenario())


@pytest.mark.parametrize("second_signal", [signal.SIGTERM, signal.SIGINT])
def test_draining_server_stops_on_second_signal_or_after_grace_period(
    tmp_path: Path, second_signal
) -> None:
    async def run_scenario():
        with start_server_process(tmp_path, "--drain-grace-s", "60") as server:
            async with await AsyncEnvClient.connect(server.grpc_address) as client:
                await client.open()
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(wait_for_line, server.process.stderr, WAIT_MESSAGE)
                assert server.process.poll() is None
                server.process.send_signal(second_signal)
                assert await asyncio.to_thread(server.process.wait, 60) == 0
        with start_server_process(tmp_path, "--drain-grace-s", "0.2") as server:
            async with await AsyncEnvClient.connect(server.grpc_address) as client:
                await client.open()
                server.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(server.process.wait, 60) == 0

    asyncio.run(run_scenario())


def wait_for_line(lines, text: str) -> None:
    while text not in (line := lines.readline()):
        assert line, f"process exited before it printed {text!r}"


def test_server_exits_with_an_error_that_names_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        http_process = run_server("--port", port, "--grpc-port", "0")
        grpc_process = run_server("--port", "0", "--grpc-port", port)
    for process, name in ((http_process, "port"), (grpc_process, "grpc_port")):
        assert process.returncode == 2
        assert process.stderr.startswith(f"error: {name} {port} is in use on ")
        assert process.stderr.count("\n") == 1


def test_two_servers_never_share_a_grpc_port() -> None:
    async def run_scenario():
        async with serve() as server:
            port = int(server.grpc_address.rpartition(":")[2])
            with pytest.raises(PortInUseError, match=str(port)):
                await serve(grpc_port=port).start()

    asyncio.run(run_scenario())


def test_non_loopback_host_requires_a_token_or_insecure() -> None:
    process = run_server("--host", "0.0.0.0", "--port", "0")
    assert process.returncode == 2
    assert "listening on 0.0.0.0" in process.stderr
    assert process.stderr.count("\n") == 1
    assert ServerOptions(host="0.0.0.0", insecure=True).token is None
    assert ServerOptions(host="0.0.0.0", token="t").host == "0.0.0.0"


def test_token_comes_from_the_environment_variable(tmp_path: Path) -> None:
    with start_server_process(tmp_path, "--token-env", "MY_TOKEN", env={"MY_TOKEN": "t"}) as server:
        request = urllib.request.Request(
            server.http_address + "/metadata", headers={"authorization": "Bearer t"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 60_000}, "grpc_port must be between 0 and 65535, got 70000"),
        ({"port": -1}, "port: expected at least 0, got -1"),
        ({"max_sessions": 0}, "max_sessions: expected at least 1, got 0"),
    ],
)
def test_out_of_range_options_raise_a_config_error(options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**options)


def test_adjacent_ports_have_adjacent_grpc_ports() -> None:
    assert [ServerOptions(port=port).requested_grpc_port for port in (8004, 8005)] == [18004, 18005]
    assert ServerOptions(port=0).requested_grpc_port == 0
    assert CountingEnv.steps_on_event_loop


# -- options ---------------------------------------------------------------------------

KEY = "a-key-that-a-gateway-and-a-server-share"


def open_with_signed_id(address: str, session_id: str) -> str:
    async def open_session() -> str:
        async with RawStream(address) as stream:
            return await asyncio.wait_for(stream.open(session_id=session_id), 60)

    return asyncio.run(open_session())


@pytest.mark.parametrize("isolation", ["inline", "pool", "process"])
def test_command_line_options_reach_the_server(tmp_path: Path, isolation: str) -> None:
    async def run_scenario():
        arguments = ["--isolation", isolation, "--first-seed", "7", "--max-sessions", "4"]
        arguments += ["--no-determinism-check"] if isolation == "pool" else []
        variables = {"LUDUS_SESSION_KEY": KEY, "POD_UID": "8c5f7a3e-0b1d"}
        with start_server_process(tmp_path, *arguments, env=variables) as server:
            client = await AsyncEnvClient.connect(server.grpc_address)
            description = await client.describe()
            assert (description.server_id, description.max_sessions) == ("8c5f7a3e0b1d", 4)
            assert description.is_deterministic is (isolation != "pool")
            unseeded_observations = [(await client.open())[1].observation for _ in range(2)]
            seeded_observation = (await client.open(seed=7))[1].observation
            assert seeded_observation == unseeded_observations[0] != unseeded_observations[1]
            signed_id = SessionKey(KEY.encode()).sign("counting", description.server_id)
            assert (
                await asyncio.to_thread(open_with_signed_id, server.grpc_address, signed_id)
                == signed_id
            )
            await client.close()

    asyncio.run(run_scenario())


def test_conflicting_options_exit_with_a_one_line_error_and_code_2() -> None:
    process = run_server("--port", "0", "--isolation", "pool", "--cpu-limit-s", "5")
    assert process.returncode == 2
    assert process.stderr.startswith("error: cpu_limit_s needs isolation='process'")
    assert process.stderr.count("\n") == 1


def test_failed_build_in_a_worker_exits_with_one_line_error_and_code_2() -> None:
    command = [sys.executable, "-m", "ludus.env", "counting_env:fail_during_creation"]
    process = subprocess.run(
        [*command, "--port", "0", "--isolation", "process"],
        cwd=Path(SERVER_PATH).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 2
    assert "RuntimeError: no luck" in process.stderr
    assert process.stderr.count("\n") == 1


def test_waiting_open_succeeds_in_a_pool_when_a_session_closes(tmp_path: Path) -> None:
    async def run_scenario():
        arguments = ("--isolation", "pool", "--max-sessions", "1", "--wait-for-slot-s", "60")
        with start_server_process(tmp_path, *arguments) as server:
            client = await AsyncEnvClient.connect(server.grpc_address)
            session, _ = await client.open()
            open_task = asyncio.create_task(client.open(seed=1))
            await asyncio.sleep(0.1)
            assert not open_task.done()
            await session.close()
            assert (await (await open_task)[0].step({"add": 1})).reward == 1.0
            await client.close()

    asyncio.run(run_scenario())


@pytest.mark.parametrize(
    ("target", "isolation", "has_workers"),
    [
        ("counting_env:SingletonCountingEnv", None, True),
        ("counting_env:SingletonCountingEnv", "inline", False),
        ("counting_env:CountingEnv", None, False),
    ],
)
def test_environments_that_need_a_process_use_workers_by_default(
    monkeypatch, target, isolation: str, has_workers
) -> None:
    monkeypatch.chdir(Path(SERVER_PATH).parent)
    with LocalServer(target, isolation=isolation, max_sessions=2) as server:
        metrics = httpx.get(f"{server.addresses.http}/metrics", timeout=60).text
        assert ("env_server_workers" in metrics) is has_workers


def test_local_server_forwards_isolation_arguments_and_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(SERVER_PATH).parent)
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
        signed_id = SessionKey(KEY.encode()).sign("counting", "elsewhere")
        with pytest.raises(AssertionError, match="belongs to another server"):
            open_with_signed_id(server.addresses.grpc, signed_id)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal exists only on Linux")
def test_server_exits_if_its_parent_is_already_dead() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ""])
    parent.wait()
    command = [sys.executable, "-m", "ludus.env", "counting_env:CountingEnv", "--port", "0"]
    process = subprocess.run(
        [*command, "--exit-with-parent", str(parent.pid)],
        cwd=Path(SERVER_PATH).parent,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr

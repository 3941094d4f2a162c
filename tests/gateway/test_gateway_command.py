"""The `ludus gateway` process: command line, configuration file, server processes and signals."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.services.gateway.config import GatewayConfig
from tests.env.polling import wait_until

pytestmark = pytest.mark.slow

LUDUS_PROGRAM = str(Path(sys.executable).with_name("ludus"))
BLACKJACK_ARGUMENTS = ("--env", "blackjack=openspiel_env", "--option", "blackjack.game=blackjack")


def copy_environ_without_ludus_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("LUDUS_")}


@contextmanager
def run_gateway_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a gateway, and yield its process and gRPC address."""
    process = subprocess.Popen(
        [LUDUS_PROGRAM, "gateway", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=copy_environ_without_ludus_variables(),
    )
    try:
        output = ""
        while "all environments" not in output:
            line = process.stdout.readline()
            assert line, f"gateway exited during its start: {output}"
            output += line
        yield process, re.search(r"(grpc://[0-9.:]+)", output)[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def list_child_pids(pid: int) -> list[int]:
    return [
        int(pid_text) for pid_text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ] or [
        int(process_folder.name)
        for process_folder in Path("/proc").iterdir()
        if process_folder.name.isdigit() and _read_parent_pid(process_folder) == pid
    ]


def _read_parent_pid(process_folder: Path) -> int:
    try:
        return int((process_folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("end_signal", [signal.SIGTERM, signal.SIGKILL])
async def test_gateway_starts_and_stops_its_servers(end_signal):
    with run_gateway_process(*BLACKJACK_ARGUMENTS, "--servers", "2") as (process, address):
        await wait_until(lambda: len(list_child_pids(process.pid)) == 2)
        child_pids = list_child_pids(process.pid)
        async with await AsyncEnvClient.connect(address) as client:
            session, first_result = await client.open(seed=3)
            assert first_result.text is not None
            assert (await session.step(text="STAND")).done
        process.send_signal(end_signal)
        assert await asyncio.to_thread(process.wait, 60) == (
            0 if end_signal == signal.SIGTERM else -9
        )
        await wait_until(lambda: not any(is_alive(pid) for pid in child_pids))


async def test_second_signal_ends_the_wait_for_sessions():
    with run_gateway_process(*BLACKJACK_ARGUMENTS) as (process, address):
        async with await AsyncEnvClient.connect(address) as client:
            session, _ = await client.open(seed=3)
            process.send_signal(signal.SIGINT)
            with pytest.raises(Exception, match="draining"):
                while True:  # until the gateway has received the signal
                    await client.open(seed=4)
            assert (await session.step(text="STAND")).done
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 60) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "--config or --env is required"),
        (("--env", "blackjack"), "must be NAME=TARGET"),
        (("--env", "a=x_env", "--env", "a=y_env"), "names 'a' twice"),
        (("--env", "a=grpc://nowhere"), "must be grpc://host:port"),
        (("--env", "a=grpc://h:1", "--option", "a.game=x"), "runs on this machine"),
        (("--env", "a=grpc://h:1"), "LUDUS_SESSION_KEY"),
        (("--env", "a=nope_env", "--port", "0"), "no environment package 'nope_env'"),
        (("--env", "a=openspiel_env", "--isolation", "some"), "'inline', 'pool' or 'process'"),
        (("--env", "a=openspiel_env", "--host", "0.0.0.0"), "needs tenants or a token"),
        (("--config", "/nowhere.toml"), "/nowhere.toml"),
        (("--config", "/nowhere.toml", "--servers", "2"), "set environments.NAME.num_servers"),
        (("--env", "a=grpc://h:1", "--max-sessions", "7"), "--max-sessions applies to targets"),
    ],
)
def test_invalid_arguments_exit_with_an_error_and_no_traceback(arguments, expected):
    process = subprocess.run(
        [LUDUS_PROGRAM, "gateway", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=copy_environ_without_ludus_variables(),
    )
    assert process.returncode == 2
    assert expected in process.stderr
    assert "Traceback" not in process.stderr


def test_example_of_the_page_is_a_valid_configuration(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "gateway-configuration.md").read_text("utf-8")
    path = tmp_path / "gateway.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])
    config = GatewayConfig.read(path)
    assert {name: env.kind for name, env in config.environments.items()} == {
        "blackjack": "subprocess",
        "cards": "static",
    }
    assert config.sessions.queue_timeout_s == 60


def test_env_option_replaces_the_environments_of_the_file(tmp_path):
    path = tmp_path / "gateway.toml"
    path.write_text("[environments.a]\nkind = 'static'\naddresses = ['grpc://h:1']")
    section = {"kind": "static", "addresses": ["grpc://h:2"]}
    config = GatewayConfig.read(path, {"environments": {"b": section}})
    assert list(config.environments) == ["b"]


def test_options_override_the_configuration_file(tmp_path):
    path = tmp_path / "gateway.toml"
    path.write_text(
        """
port = 9000
[sessions]
linger_s = 5.0
[environments.cards]
kind = "static"
addresses = ["grpc://10.0.0.7:18000"]
[environments.fleet]
kind = "kubernetes"
service = "cards"
namespace = "arena"
"""
    )
    config = GatewayConfig.read(path, {"port": 9100})
    assert (config.port, config.grpc_port) == (9100, None)
    assert config.sessions.linger_s == 5.0
    assert {env.kind for env in config.environments.values()} == {"static", "kubernetes"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prot = 1\n[environments]", "prot"),
        ("[environments.a]\nkind = 'statik'", "statik"),
        ("[environments.'a b']\nkind = 'static'\naddresses = ['grpc://h:1']", "environments"),
        ("[sessions]\nlinger_s = -1\n[environments]", "linger_s"),
        ("port = 60000\n[environments]", "port = 60000 needs a grpc_port"),
        ("x = ", "TOML"),
    ],
)
def test_configuration_error_contains_the_field(tmp_path, text, expected):
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    with pytest.raises(Exception, match=expected) as error:
        GatewayConfig.read(path)
    assert str(path) in str(error.value)

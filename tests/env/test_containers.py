"""Clients that start a server in a container, wait for it, and always remove it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from echo_env import EchoAction, EchoEnv, make_environment
from ludus.env import __main__ as main_module
from ludus.env.client import ConnectOptions, EnvClient
from ludus.env.client.containers import LocalContainers
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.errors import ConfigError, UnavailableError


@dataclass
class FakeProvider:
    """A provider of containers that records calls and always returns the same address."""

    address: str
    is_ready: bool = True
    calls: list[object] = field(default_factory=list)

    def start_container(
        self, image: str, port: int | None = None, env_vars: Mapping[str, str] | None = None
    ) -> str:
        self.calls.append(("start", image, port, dict(env_vars or {})))
        return self.address

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        self.calls.append(("wait", base_url, timeout_s))
        if not self.is_ready:
            raise UnavailableError("the container exited before it was ready")

    def stop_container(self) -> None:
        self.calls.append("stop")


# -- the client with a fake provider ------------------------------------------------------


async def test_client_uses_a_container_and_stops_it_on_close() -> None:
    token = "a token of 16 characters or more"
    async with EnvServer(make_environment, ServerOptions(port=0, token=token)) as server:
        provider = FakeProvider(server.http_address)
        assert await asyncio.to_thread(play_one_step, provider, token) == 1.3
    assert provider.calls == [
        ("start", "echo-env:latest", 8123, {"LEVEL": "3", "LUDUS_ENV_TOKEN": token}),
        ("wait", server.http_address, 30.0),
        "stop",
    ]


def play_one_step(provider: FakeProvider, token: str) -> float | None:
    variables = {"LEVEL": "3", "LUDUS_ENV_TOKEN": token}
    client = EchoEnv.from_docker_image("echo-env:latest", provider, variables, 8123)
    with client:
        client.reset()
        reward = client.step(EchoAction(message="Hello, World!")).reward
    client.close()  # a second call is harmless
    return reward


@pytest.mark.parametrize("is_ready", [False, True])
def test_container_is_stopped_if_the_connection_fails(
    is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_connection(address: str, options: ConnectOptions) -> EnvClient:
        raise UnavailableError(f"no server at {address}")

    monkeypatch.setattr(EnvClient, "connect", refuse_connection)
    provider = FakeProvider("http://127.0.0.1:9", is_ready)
    with pytest.raises(UnavailableError):
        EchoEnv.from_docker_image("echo-env:latest", provider)
    assert provider.calls[-1] == "stop"


def test_containers_get_unique_tokens_unless_the_token_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens: list[object] = []

    def connect(address: str, options: ConnectOptions) -> None:
        tokens.append(options.token)

    monkeypatch.setattr(EnvClient, "connect", connect)
    providers = [FakeProvider("http://127.0.0.1:9") for _ in range(3)]
    for provider, variables in zip(providers, [None, {}, {"LUDUS_ENV_TOKEN": ""}], strict=True):
        EchoEnv.from_docker_image("echo-env:latest", provider, variables)
    start_calls = [provider.calls[0] for provider in providers]
    generated_tokens = [call[-1]["LUDUS_ENV_TOKEN"] for call in start_calls]
    assert tokens == [generated_tokens[0], generated_tokens[1], None]
    assert len(set(generated_tokens)) == 3 and len(generated_tokens[0]) > 30


async def test_hub_space_runs_in_a_container_of_the_registry_image() -> None:
    token = "a token of 16 characters or more"
    async with EnvServer(make_environment, ServerOptions(port=0, token=token)) as server:
        provider = FakeProvider(server.http_address)

        def play() -> float | None:
            variables = {"LUDUS_ENV_TOKEN": token}
            with EchoEnv.from_hub("OpenEnv/echo_env", provider, variables, tag="v2") as client:
                client.reset()
                return client.step(EchoAction(message="four")).reward

        assert await asyncio.to_thread(play) == 0.4
    image = "registry.hf.space/openenv-echo-env:v2"
    assert provider.calls[0] == ("start", image, None, {"LUDUS_ENV_TOKEN": token})
    assert provider.calls[-1] == "stop"


@pytest.mark.parametrize("name", ["echo_env", "a/b/c", "a/ b", "https://huggingface.co/a/b", ""])
def test_invalid_space_name_or_tag_starts_no_container(name: str) -> None:
    provider = FakeProvider("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="owner/name"):
        EchoEnv.from_hub(name, provider)
    with pytest.raises(ConfigError, match="tag of an image"):
        EchoEnv.from_hub("a/b", provider, tag="v 2")
    assert provider.calls == []


# -- docker and podman -----------------------------------------------------------------

ENGINE_SCRIPT = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/commands"
case "$1" in
  info) exit $(cat "$here/info" 2>/dev/null || echo 0) ;;
  run) [ -e "$here/refusal" ] && { cat "$here/refusal" >&2; exit 125; }
       env | grep ^LEVEL= >> "$here/variables"; touch "$here/running"; echo 0a1b2c ;;
  port) cat "$here/address" ;;
  inspect) [ -e "$here/dead" ] && echo false || echo true ;;
  logs) echo "first word"; echo "last word" ;;
  rm) rm -f "$here/running" ;;
esac
"""


@dataclass
class FakeEngine:
    """A program that replaces docker and records its arguments."""

    folder: Path

    @property
    def path(self) -> str:
        return str(self.folder / "docker")

    @property
    def is_running(self) -> bool:
        """True if the started container exists."""
        return (self.folder / "running").exists()

    @property
    def commands(self) -> list[str]:
        """Arguments of each engine call, as one string per call."""
        return (self.folder / "commands").read_text().splitlines()

    def write_file(self, name: str, text: str = "") -> None:
        """Write a file that controls the output of the program."""
        (self.folder / name).write_text(text)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake_engine = FakeEngine(tmp_path)
    Path(fake_engine.path).write_text(ENGINE_SCRIPT)
    Path(fake_engine.path).chmod(0o755)
    fake_engine.write_file("address", "127.0.0.1:9\n")
    tools_folder = tmp_path / "tools"
    tools_folder.mkdir()
    for name in ("cat", "dirname", "env", "grep", "rm", "touch"):
        (tools_folder / name).symlink_to(shutil.which(name) or name)
    # PATH contains no other folders, because this machine may have docker.
    monkeypatch.setenv("PATH", f"{tmp_path}:{tools_folder}")
    return fake_engine


async def test_container_port_is_local_and_stop_removes_the_container(
    engine: FakeEngine,
) -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as server:
        engine.write_file("address", server.http_address.removeprefix("http://"))
        provider = LocalContainers()
        base_url = await asyncio.to_thread(
            provider.start_container, "echo-env:latest", env_vars={"LEVEL": "secret"}
        )
        assert base_url == server.http_address and engine.is_running
        await asyncio.to_thread(provider.wait_for_ready, base_url, 10.0)
        provider.stop_container()
    assert not engine.is_running
    run_command = next(line for line in engine.commands if line.startswith("run "))
    assert "--publish 127.0.0.1::8000 --env LEVEL echo-env:latest" in run_command
    assert (engine.folder / "variables").read_text() == "LEVEL=secret\n"


def test_host_port_of_a_container_can_be_set(engine: FakeEngine) -> None:
    provider = LocalContainers(engine.path)
    provider.start_container("echo-env:latest", port=8123)
    assert any("--publish 127.0.0.1:8123:8000" in line for line in engine.commands)
    with pytest.raises(ConfigError, match="this one runs 'ludus-"):
        provider.start_container("echo-env:latest")
    provider.stop_container()
    provider.stop_container()
    assert not engine.is_running


def test_container_exit_during_start_is_reported_with_the_log(engine: FakeEngine) -> None:
    engine.write_file("dead")
    with pytest.raises(
        UnavailableError,
        match="its log: first word\nlast word",
    ):
        EchoEnv.from_docker_image("echo-env:latest")
    assert not engine.is_running


def test_container_that_is_not_ready_in_time_is_removed(engine: FakeEngine) -> None:
    with pytest.raises(UnavailableError, match=r"9/health did not respond within 0\.2 s"):
        EchoEnv.from_docker_image("echo-env:latest", timeout_s=0.2)
    assert not engine.is_running


def test_missing_image_is_reported_with_the_engine_message(engine: FakeEngine) -> None:
    engine.write_file("refusal", "trying to pull\nError: no such image\n")
    with pytest.raises(ConfigError, match="docker run' failed: Error: no such image"):
        EchoEnv.from_docker_image("nowhere:latest")
    assert not engine.is_running


def test_missing_container_engine_is_reported_with_a_remedy(
    engine: FakeEngine,
) -> None:
    engine.write_file("info", "1")
    with pytest.raises(ConfigError) as error_info:
        EchoEnv.from_docker_image("echo-env:latest")
    assert str(error_info.value) == (
        "cannot start a container: docker does not respond; install or start one of the engines"
        " docker and podman, or start the server manually and connect with base_url"
    )
    Path(engine.path).unlink()
    with pytest.raises(ConfigError, match="docker or podman is not installed"):
        EchoEnv.from_docker_image("echo-env:latest")


@pytest.mark.slow
def test_container_is_removed_when_the_owner_process_is_killed(engine: FakeEngine) -> None:
    owner_code = (
        "from ludus.env.client.containers import LocalContainers; import time\n"
        f"LocalContainers({engine.path!r}).start_container('echo-env:latest')\n"
        "print('started', flush=True); time.sleep(600)"
    )
    owner_process = subprocess.Popen(
        [sys.executable, "-c", owner_code], stdout=subprocess.PIPE, text=True
    )
    assert owner_process.stdout is not None and owner_process.stdout.readline() == "started\n"
    assert engine.is_running
    os.kill(owner_process.pid, signal.SIGKILL)
    owner_process.communicate()
    deadline_s = time.monotonic() + 30
    while engine.is_running and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not engine.is_running


# -- the program in the container --------------------------------------------------------


@pytest.mark.parametrize(("token", "flags"), [("", ["--insecure"]), ("secret", [])])
def test_main_without_arguments_serves_the_package_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, token: str, flags: list[str]
) -> None:
    server_arguments: list[list[str]] = []
    monkeypatch.setattr("echo_env.server.app.main", server_arguments.append)
    monkeypatch.setenv(main_module.PACKAGE_VARIABLE, "echo_env")
    monkeypatch.setenv("LUDUS_ENV_TOKEN", token)
    with pytest.raises(SystemExit) as exit_info:
        main_module.main([])
    assert exit_info.value.code == 0
    assert server_arguments == [["--host", "0.0.0.0", "--port", "8000", *flags]]


def test_main_without_arguments_or_package_variable_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(main_module.PACKAGE_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as exit_info:
        main_module.main([])
    assert exit_info.value.code == 2
    assert "package" in capsys.readouterr().err

"""Processes that the tests attack, each started from a new folder, and bystanders.

    attacker --hostile inputs--> server, gateway or endpoint <--steps-- bystander

A process runs the code of this checkout, but its folder contains only the hostile environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LUDUS_PROGRAM = str(Path(sys.executable).with_name("ludus"))
HOSTILE_ENV = "hostile_env:HostileEnv"
START_TIMEOUT_S = 120.0
MAX_PAUSE_S = 5.0
"""Maximum duration of a bystander's call. The attacks stopped servers for much longer."""


def make_cases(inputs: Mapping[str, Any], num_short: int = 1) -> list[Any]:
    """Return parameters of a test: the first inputs are in the short form, all in the long form."""
    return [
        pytest.param(value, id=name, marks=[pytest.mark.attack] if index >= num_short else [])
        for index, (name, value) in enumerate(inputs.items())
    ]


@dataclass
class AttackedProcess:
    """A running process with its addresses."""

    process: subprocess.Popen[bytes]
    addresses: dict[str, str]
    log_file: Path
    """File with everything that the process prints."""

    @property
    def http(self) -> str:
        return self.addresses["http"]

    @property
    def grpc(self) -> str:
        return self.addresses["grpc"]

    @property
    def port(self) -> int:
        """Number of the HTTP port."""
        return int(self.http.rpartition(":")[2])

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def read_log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")


def make_folder(folder: Path) -> Path:
    """Return a new folder that contains only the hostile environment."""
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("hostile_env.py"), folder)
    return folder


def run_command(
    folder: Path, *arguments: str, answers: str = "", timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a `ludus` command in `folder`, with lines on standard input; return its output."""
    return subprocess.run(
        [LUDUS_PROGRAM, *arguments],
        cwd=folder,
        input=answers,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "TERM": "dumb"},
    )


@contextmanager
def serve_env(
    folder: Path,
    *arguments: str,
    target: str = HOSTILE_ENV,
    variables: Mapping[str, str] | None = None,
) -> Iterator[AttackedProcess]:
    """Serve an environment in a new folder."""
    folder = make_folder(folder) if not folder.exists() else folder
    ready_file = folder.with_name(f"{folder.name}-ready.json")
    command = [sys.executable, "-m", "ludus.env", target, "--port", "0", "--no-determinism-check"]
    command += ["--ready-file", str(ready_file), *arguments]
    with start_process(command, folder, variables) as attacked:
        _wait_until_ready(attacked, ready_file.exists)
        attacked.addresses = json.loads(ready_file.read_text())
        yield attacked


@contextmanager
def serve_gateway(folder: Path, *arguments: str) -> Iterator[AttackedProcess]:
    """Serve the hostile environment behind a gateway in a new folder."""
    command = [LUDUS_PROGRAM, "gateway", "--env", f"hostile={HOSTILE_ENV}", "--port", "0"]
    with start_process([*command, *arguments], make_folder(folder)) as attacked:
        _wait_until_ready(attacked, lambda: "all environments" in attacked.read_log())
        words = attacked.read_log().split()
        [http_url] = {word for word in words if word.endswith("/envs/hostile")}
        [grpc_url] = {word for word in words if word.startswith("grpc://")}
        attacked.addresses = {"http": http_url.split("/envs/")[0], "grpc": grpc_url}
        yield attacked


@contextmanager
def serve_agents(folder: Path, num_episodes: int, *arguments: str) -> Iterator[AttackedProcess]:
    """Serve the endpoint of agents; the addresses of episode N are `base_url_N` and `api_key_N`."""
    folder.mkdir()
    program = str(ROOT / "bench" / "attacked_endpoint.py")
    command = [sys.executable, program, "--episodes", str(num_episodes), *arguments]
    with start_process(command, folder) as attacked:
        _wait_until_ready(attacked, lambda: "}\n" in attacked.read_log())
        attacked.addresses = json.loads(attacked.read_log().splitlines()[-1])
        yield attacked


@contextmanager
def start_process(
    command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[AttackedProcess]:
    """Start a process whose output goes to a file, and kill it at the end."""
    log_file = folder.with_name(f"{folder.name}.log")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("LUDUS_")}
    environment |= {"PYTHONUNBUFFERED": "1", **(variables or {})}
    with log_file.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield AttackedProcess(process, {}, log_file)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(attacked: AttackedProcess, is_ready: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not is_ready():
        assert attacked.is_alive, attacked.read_log()
        assert time.monotonic() < deadline_s, "the process is not ready"
        time.sleep(0.02)


@asynccontextmanager
async def watch(call: Callable[[], Awaitable[object]]) -> AsyncIterator[list[float]]:
    """Repeat a bystander's call during a block, and check that none takes long.

    The list that is yielded contains the duration of each call in seconds.
    """
    durations_s: list[float] = []
    stop_event = asyncio.Event()

    async def repeat() -> None:
        while not stop_event.is_set():
            start_s = time.monotonic()
            await call()
            durations_s.append(time.monotonic() - start_s)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(repeat())
    try:
        await asyncio.sleep(0.05)
        yield durations_s
        stop_event.set()
        await asyncio.wait_for(task, 60)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert max(durations_s) < MAX_PAUSE_S


@contextmanager
def serve_env_with_launcher(
    launcher: Sequence[str], folder: Path, target: str, *arguments: str
) -> Iterator[AttackedProcess]:
    """Serve an environment in a new folder, with a command that runs another command."""
    make_folder(folder)
    ready_file = folder.with_name(f"{folder.name}-ready.json")
    command = [*launcher, sys.executable, "-m", "ludus.env", target, "--port", "0"]
    command += ["--no-determinism-check", "--ready-file", str(ready_file), *arguments]
    with start_process(command, folder) as attacked:
        _wait_until_ready(attacked, ready_file.exists)
        attacked.addresses = json.loads(ready_file.read_text())
        yield attacked

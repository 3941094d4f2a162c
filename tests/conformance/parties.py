"""Servers and clients of the conformance tests.

All clients play the same seeded games with the same policy (`upstream/policy.py`). They return
the observation, reward and done flag of each step, and the number of steps.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quiet_ports import quiet_ports
from upstream_environment import install_upstream

from ludus.env.client import ConnectOptions, EnvClient
from tests.conformance.upstream.policy import choose_action, remove_metadata, select_state

UPSTREAM_FOLDER = Path(__file__).parent / "upstream"
GAME = "blackjack"
NUM_GAMES = 200
FIRST_SEED = 1000
TRL = "trl==1.16.0"
TRL_PACKAGES = [
    TRL,
    "torch==2.13.0",
    "transformers==5.19.0",
    "accelerate==1.15.0",
    "datasets",
    "openenv==0.10.0",
    "jmespath",
]
OPEN_SPIEL = "open_spiel==2.0.2"
START_TIMEOUT_S = 240.0

CLIENTS = {
    "0.1.1": ("openenv-core==0.1.1", "player_http.py"),
    "0.2.1": ("openenv-core==0.2.1", "player_websocket.py"),
    "0.3.0": ("openenv-core==0.3.0", "player_websocket.py"),
    "0.10.0": ("openenv==0.10.0", "player_websocket.py"),
}
SERVERS = {
    "0.1.1": ("openenv-core==0.1.1", "server_http.py"),
    "0.3.0": ("openenv-core==0.3.0", "server_websocket.py"),
    "0.10.0": ("openenv==0.10.0", "server_websocket.py"),
}

Games = list[dict[str, Any]]


@dataclass(frozen=True)
class LudusServer:
    """A running Ludus environment server."""

    http_address: str
    grpc_address: str
    session_key: str


def install_upstream_python(requirement: str) -> Path:
    """Install an upstream package with OpenSpiel; return the interpreter."""
    return install_upstream(requirement, extra=[OPEN_SPIEL])


def play_with_upstream_client(version: str, address: str) -> Games:
    """Play the games with an upstream client of this version; return them."""
    requirement, program = CLIENTS[version]
    python = install_upstream_python(requirement)
    return json.loads(run_upstream(python, program, address, str(FIRST_SEED), str(NUM_GAMES)))


def run_upstream(python: Path, program: str, *arguments: str) -> str:
    """Run a program of the folder `upstream`; return its standard output."""
    completed_process = subprocess.run(
        [python, "-I", UPSTREAM_FOLDER / program, *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert completed_process.returncode == 0, completed_process.stderr[-3000:]
    return completed_process.stdout


def play_with_ludus_client(address: str, *, sends_seeds: bool = True, **options: Any) -> Games:
    """Play the games with our client in one session; return them."""
    games = []
    with EnvClient.connect(
        address, ConnectOptions(connect_timeout_s=START_TIMEOUT_S, **options)
    ) as client:
        session = client.open_session()
        for seed in range(FIRST_SEED, FIRST_SEED + NUM_GAMES):
            results = [session.reset(seed=seed if sends_seeds else None)]
            while not results[-1].done:
                action = {"action_id": choose_action(results[-1].observation)}
                results.append(session.step(action))
            steps = [
                [remove_metadata(result.observation), result.reward, result.done]
                for result in results
            ]
            games.append({"results": steps, "state": select_state(session.state())})
    return games


@contextmanager
def start_ludus_server(folder: Path, game: str, *arguments: str) -> Iterator[LudusServer]:
    """Start our server of a game. Resets without a seed count upwards from FIRST_SEED."""
    first_seed = ("--first-seed", str(FIRST_SEED))
    with serve_package(folder, "openspiel_env", {"game": game}, *first_seed, *arguments) as server:
        yield server


@contextmanager
def serve_package(
    folder: Path, package: str, options: dict[str, Any], *arguments: str
) -> Iterator[LudusServer]:
    """Start our server of an environment package; yield its addresses and session key."""
    ready_file = folder / "ready.json"
    session_key = secrets.token_hex(32)
    command = [
        *(sys.executable, "-m", "ludus.env", package),
        *("--options", json.dumps(options), "--port", "0"),
        *("--ready-file", str(ready_file), *arguments),
    ]
    environment = {**os.environ, "LUDUS_SESSION_KEY": session_key}
    with start_process(command, environment) as process:
        wait_until(ready_file.exists, process)
        addresses = json.loads(ready_file.read_text())
        yield LudusServer(addresses["http"], addresses["grpc"], session_key)


@contextmanager
def start_ludus_gateway(folder: Path, server: LudusServer, token: str = "") -> Iterator[str]:
    """Start a gateway; yield the address of its route to the server, including `token`."""
    [port] = quiet_ports(1)
    command = [
        *(str(Path(sys.executable).with_name("ludus")), "gateway"),
        *("--env", f"{GAME}={server.grpc_address}"),
        *("--port", str(port), "--grpc-port", "0"),
    ]
    environment = {**os.environ, "LUDUS_SESSION_KEY": server.session_key}
    if token:
        environment["LUDUS_GATEWAY_TOKEN"] = token
    credentials = f"player:{token}@" if token else ""
    with start_process(command, environment) as process:
        wait_until(lambda: is_responding(f"http://127.0.0.1:{port}/readyz"), process)
        yield f"http://{credentials}127.0.0.1:{port}/envs/{GAME}"


@contextmanager
def start_upstream_server(version: str, max_sessions: int = 512, game: str = GAME) -> Iterator[str]:
    """Start OpenEnv's server of this version; yield its address.

    Servers before 0.2 ignore `max_sessions` and have one session.
    """
    requirement, program = SERVERS[version]
    [port] = quiet_ports(1)
    python = str(install_upstream_python(requirement))
    arguments = [game, str(port), str(FIRST_SEED), str(max_sessions)]
    with start_process([python, "-I", str(UPSTREAM_FOLDER / program), *arguments]) as process:
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_responding(f"{address}/health"), process)
        yield address


@contextmanager
def start_process(
    command: list[str], environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a process; kill it on exit from the context."""
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(is_ready, process: subprocess.Popen[str]) -> None:
    """Wait until `is_ready()` is true; fail if the process exits or takes too long."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not is_ready():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline_s, "the process was not ready in time"
        time.sleep(0.1)


def is_responding(url: str) -> bool:
    """Return whether a GET request to `url` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def parse_json(text: str) -> dict[str, Any]:
    """Return the JSON object in a program's output."""
    match = re.search(r"\{.*\}", text, re.DOTALL)
    assert match, text
    return json.loads(match.group())

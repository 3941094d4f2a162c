"""Compare the steps per second of environment servers and clients: `make bench-env`.

    core 0: server (ours, and OpenEnv's own)  <---->  core 1: clients (and the gateway)

Each contender plays blackjack with random legal moves in 64 sessions with different seeds. Steps
and resets are counted separately. `training` plays with the code of a rollout worker
(`bench/training_load.py`). The contenders alternate round by round, so that a slow phase of the
machine affects all of them. OpenEnv's server and client are installed from the package index in a
separate virtual environment (`dev/upstream_environment.py`, `bench/upstream/`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "dev"))

from upstream_environment import install_upstream  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "env.json"
UPSTREAM = ROOT / "bench" / "upstream"
LOAD = [sys.executable, str(ROOT / "bench" / "environment_load.py")]
TRAINING_LOAD = [sys.executable, str(ROOT / "bench" / "training_load.py")]
OPENENV, OPENSPIEL = "openenv==0.10.0", "open_spiel==2.0.2"
SERVER_CORE, CLIENT_CORE = 0, 1
NUM_SESSIONS = 64
NUM_HELD = 2000
MAX_SESSIONS = 4096
SESSION_KEY = secrets.token_hex(32)
"""Session key shared by the gateway and the servers."""
START_TIMEOUT_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Contender:
    """A row of the table: a load, its server and its samples."""

    name: str
    label: str
    command: Sequence[str]
    server: subprocess.Popen[str] | None
    """Process whose processor time is measured; None if the game runs in the load's process."""
    samples: list[dict[str, float]] = field(default_factory=list)

    @property
    def steps_per_s(self) -> float:
        """Median of the rounds."""
        return statistics.median(sample["steps_per_s"] for sample in self.samples)

    def median(self, key: str) -> float:
        """Return the median of one value of the samples."""
        return statistics.median(sample[key] for sample in self.samples)


@dataclass(frozen=True)
class Servers:
    """The measured servers and their addresses."""

    upstream: subprocess.Popen[str]
    upstream_http: str
    ludus: subprocess.Popen[str]
    http: str
    grpc: str
    isolated_grpc: str
    gateway_grpc: str
    """Address of the gateway; empty without a gateway."""


# -- processes -----------------------------------------------------------------------------


@contextlib.contextmanager
def running(command: Sequence[str], core: int, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a process on one core until the block ends."""
    process = subprocess.Popen(
        command,
        text=True,
        cwd=ROOT,
        env=os.environ | {"LUDUS_SESSION_KEY": SESSION_KEY},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        **options,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def run_ludus_server(
    folder: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Start a Ludus server; yield its process and its HTTP and gRPC addresses."""
    ready_file = folder / f"ready-{time.monotonic_ns()}.json"
    command = [sys.executable, "-m", "openspiel_env.server.app", "--game", "blackjack"]
    command += ["--port", "0", "--max-sessions", str(MAX_SESSIONS)]
    command += ["--ready-file", str(ready_file), *arguments]
    with running(command, SERVER_CORE, stderr=subprocess.DEVNULL) as process:
        _wait_until(ready_file.exists, process, "the Ludus server")
        ready = json.loads(ready_file.read_text())
        yield process, ready["http"], ready["grpc"]


@contextlib.contextmanager
def listening(command: Sequence[str], port: int, core: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process and wait until it listens on the port."""
    with running(command, core, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _wait_until(lambda: _accepts(port), process, command[1])
        yield process


@contextlib.contextmanager
def run_all_servers(upstream_python: Path, with_gateway: bool) -> Iterator[Servers]:
    """Start all measured servers; idle servers use no processor time."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = _free_port()
        program = str(UPSTREAM / "blackjack_server.py")
        upstream_command = [str(upstream_python), "-I", program, str(port)]
        upstream = stack.enter_context(listening(upstream_command, port, SERVER_CORE))
        ludus, http, grpc = stack.enter_context(run_ludus_server(folder))
        _, _, isolated = stack.enter_context(run_ludus_server(folder, "--isolation", "process"))
        gateway_grpc = stack.enter_context(gateway_to(grpc)) if with_gateway else ""
        yield Servers(
            upstream, f"http://127.0.0.1:{port}", ludus, http, grpc, isolated, gateway_grpc
        )


@contextlib.contextmanager
def gateway_to(grpc: str) -> Iterator[str]:
    """Start a gateway to a server and yield its gRPC address."""
    http_port, grpc_port = _free_port(), _free_port()
    command = [str(Path(sys.executable).with_name("ludus")), "gateway"]
    command += ["--env", f"blackjack={grpc}", "--port", str(http_port)]
    command += ["--grpc-port", str(grpc_port)]
    with listening(command, grpc_port, CLIENT_CORE):
        yield f"grpc://127.0.0.1:{grpc_port}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _accepts(port: int) -> bool:
    with socket.socket() as free:
        return free.connect_ex(("127.0.0.1", port)) == 0


def _wait_until(condition: Any, process: subprocess.Popen[str], name: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if process.poll() is not None:
            sys.exit(f"{name} exited early with code {process.returncode}")
        if time.monotonic() > deadline_s:
            sys.exit(f"{name} did not start within {START_TIMEOUT_S:g} s")
        time.sleep(0.05)


def measure_cpu_seconds(process: subprocess.Popen[str] | None) -> float:
    """Return the processor time of a process, in seconds."""
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


# -- what is measured ------------------------------------------------------------------------


def make_contenders(servers: Servers, upstream_python: Path) -> list[Contender]:
    """Return the contenders in the order in which they alternate."""
    ludus, grpc = servers.ludus, servers.grpc
    rows = [
        Contender(
            "base",
            "OpenEnv's server, OpenEnv's client",
            make_upstream_client(upstream_python, servers.upstream_http, "together"),
            servers.upstream,
        ),
        Contender(
            "base_as_trl_drives_it",
            "OpenEnv's server, its client as TRL drives it",
            make_upstream_client(upstream_python, servers.upstream_http, "in-turn"),
            servers.upstream,
        ),
        Contender("training", "our rollout worker's own code", [*TRAINING_LOAD, grpc], ludus),
        Contender(
            "websocket_upstream_client",
            "our WebSocket, OpenEnv's client",
            make_upstream_client(upstream_python, servers.http, "together"),
            ludus,
        ),
        Contender(
            "grpc_stream",
            "our stream, one step per message",
            [*LOAD, "stream", grpc, "--max-calls-per-message", "1"],
            ludus,
        ),
        Contender(
            "grpc_stream_together",
            "our stream, as clients use it",
            [*LOAD, "stream", grpc],
            ludus,
        ),
        Contender("pyspiel", "the game alone, in process", [*LOAD, "pyspiel"], None),
    ]
    if servers.gateway_grpc:
        command = [*LOAD, "stream", servers.gateway_grpc]
        rows.append(Contender("gateway_stream", "our stream through the gateway", command, ludus))
    return rows


def make_upstream_client(python: Path, address: str, mode: str) -> list[str]:
    """Return the command of OpenEnv's client."""
    program = str(UPSTREAM / "blackjack_client.py")
    return [str(python), "-I", program, address, str(NUM_SESSIONS), mode]


def measure(rows: list[Contender], num_rounds: int, window_s: float) -> None:
    """Add samples to the rows; the contenders alternate after a warm-up turn."""
    with contextlib.ExitStack() as stack:
        loads = []
        for row in rows:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            load = stack.enter_context(running(row.command, CLIENT_CORE, **pipes))
            _read_output(load)
            loads.append(load)
        for load in loads:
            _play(load, window_s / 3)
        for _ in range(num_rounds):
            for row, load in zip(rows, loads, strict=True):
                row.samples.append(_sample(row, load, window_s))


def _play(load: subprocess.Popen[str], window_s: float) -> dict[str, float]:
    assert load.stdin is not None
    load.stdin.write(f"{window_s}\n")
    load.stdin.flush()
    return _read_output(load)


def _sample(row: Contender, load: subprocess.Popen[str], window_s: float) -> dict[str, float]:
    start_cpu_s = measure_cpu_seconds(row.server)
    output = _play(load, window_s)
    server_cpu_s = measure_cpu_seconds(row.server) - start_cpu_s
    return {
        **output,
        "server_cpu_s": server_cpu_s,
        "steps_per_s": output["steps"] / output["seconds"],
        "resets_per_step": output["resets"] / output["steps"],
        "client_us_per_step": output["client_cpu_s"] / output["steps"] * 1e6,
        "server_us_per_step": server_cpu_s / output["steps"] * 1e6,
    }


def _read_output(load: subprocess.Popen[str]) -> dict[str, float]:
    assert load.stdout is not None
    line = load.stdout.readline()
    if not line:
        sys.exit(f"{load.args} exited early with code {load.wait()}")
    return json.loads(line)


def measure_once(*arguments: str) -> dict[str, float]:
    """Return the output of a load that measures once and exits."""
    with running([*LOAD, *arguments], CLIENT_CORE, stdout=subprocess.PIPE) as load:
        return _read_output(load)


def measure_singles(servers: Servers) -> dict[str, dict[str, float]]:
    """Measure opening sessions, many open sessions and the latency of a step."""
    singles = {
        "open_inline": measure_once("opens", servers.grpc, "--number", "640"),
        "open_process": measure_once("opens", servers.isolated_grpc, "--number", "256"),
        "hold": measure_once("hold", servers.grpc, "--sessions", str(NUM_HELD), "--number", "5"),
    }
    for wire, address in {
        "grpc": servers.grpc,
        "websocket": servers.http,
        "gateway": servers.gateway_grpc,
    }.items():
        if address:
            singles[f"latency_{wire}"] = measure_once("latency", address, "--number", "2000")
    return singles


# -- the report ------------------------------------------------------------------------------


def compute_ratios(rows: list[Contender]) -> dict[str, float | None]:
    """Return ratios of medians to the base, and of the gateway to a direct connection."""
    medians = {row.name: row.steps_per_s for row in rows}
    names = ("training", "websocket_upstream_client", "grpc_stream", "grpc_stream_together")
    ratios: dict[str, float | None] = {name: medians[name] / medians["base"] for name in names}
    ratios["training_vs_trl"] = medians["training"] / medians["base_as_trl_drives_it"]
    gateway = medians.get("gateway_stream")
    ratios["gateway_vs_direct"] = (
        None if gateway is None else gateway / medians["grpc_stream_together"]
    )
    return ratios


def report(rows: list[Contender], singles: dict[str, dict[str, float]]) -> None:
    """Print the table."""
    base = rows[0].steps_per_s
    print(
        f"{'':48}{'steps/s':>9}{'x base':>8}{'resets/step':>13}{'us/step: client':>17}{'server':>8}"
    )
    for row in rows:
        print(
            f"{row.label:<48}{row.steps_per_s:9.0f}{row.steps_per_s / base:8.2f}"
            f"{row.median('resets_per_step'):13.2f}{row.median('client_us_per_step'):17.1f}"
            f"{row.median('server_us_per_step'):8.1f}"
        )
    for name, single in singles.items():
        numbers = ", ".join(f"{key} {value:.6g}" for key, value in single.items())
        print(f"{name:<20}{numbers}")


def make_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the measurement."""
    return {
        "game": "blackjack",
        "policy": "any legal move",
        "num_sessions": NUM_SESSIONS,
        "num_rounds": arguments.rounds,
        "window_s": arguments.window_s,
        "server_core": SERVER_CORE,
        "client_core": CLIENT_CORE,
        "gateway_core": CLIENT_CORE,
        "training": "examples/blackjack/tiny.toml, with an engine that answers at once",
    }


def machine() -> dict[str, Any]:
    """Return the machine and the versions of packages."""
    packages = ("grpcio", "protobuf", "pydantic", "orjson", "uvloop", "uvicorn", "open_spiel")
    return {
        "processor": _read_processor_model(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "upstream": OPENENV,
    }


def _read_processor_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Measure, print a table and save every sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=3.0)
    parser.add_argument("--no-gateway", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if os.cpu_count() == 1:
        sys.exit("the benchmark needs two cores, one for servers and one for clients; got one")
    upstream_python = install_upstream(OPENENV, extra=[OPENSPIEL])
    initial_machine = machine()
    with run_all_servers(upstream_python, not arguments.no_gateway) as servers:
        rows = make_contenders(servers, upstream_python)
        measure(rows, arguments.rounds, arguments.window_s)
        singles = measure_singles(servers)
    report(rows, singles)
    ratios = compute_ratios(rows)
    print("ratios: " + ", ".join(f"{k} {v:.2f}" if v else f"{k} -" for k, v in ratios.items()))
    results = [{"median_steps_per_s": row.steps_per_s, **_plain(row)} for row in rows]
    saved = {
        "machine": initial_machine,
        "settings": make_settings(arguments),
        "results": results,
        "singles": singles,
        "ratios": ratios,
    }
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(saved, indent=2) + "\n")


def _plain(row: Contender) -> dict[str, Any]:
    return {"name": row.name, "label": row.label, "samples": row.samples}


if __name__ == "__main__":
    main()

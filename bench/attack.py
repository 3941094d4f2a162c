"""Latency of other tenants while one tenant and one agent keep sending hostile inputs.

    attacker  --million keys, unknown fields--> gateway --> server     <--steps-- other tenant
    attacker  --prompts of 15 MB, dear calls--> endpoint of agents     <--requests-- other agent

    python bench/attack.py --seconds 20

Prints and writes bench/results/attack.json: for each target, the latency of the other party's calls
without and with the attack, the peak memory of the target, and whether a process ended or a session
was lost. The exit code is 1 if a 99th percentile is 250 ms or more, or if anything was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from machine import machine, write_runs

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.proto.errors import LudusError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "attack.json"
MAX_P99_MS = 250.0
LUDUS_PROGRAM = str(Path(sys.executable).with_name("ludus"))
TENANTS = """
[[tenants]]
name = "attacker"
token_env = "ATTACKER_TOKEN"
[[tenants]]
name = "other"
token_env = "OTHER_TOKEN"
"""
TOKENS = {"ATTACKER_TOKEN": "a" * 40, "OTHER_TOKEN": "o" * 40}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Latencies of the other party's calls on one target."""

    target: str
    quiet_p99_ms: float
    attacked_p50_ms: float
    attacked_p99_ms: float
    attacked_max_ms: float
    num_calls: int
    num_attacks: int
    peak_memory_mb: dict[str, int]
    """Peak memory of each process of the target."""
    num_lost: int
    """Number of calls of the other party that failed, and of processes that ended."""

    @property
    def is_good(self) -> bool:
        """True if the other party was served well."""
        return self.attacked_p99_ms < MAX_P99_MS and not self.num_lost


def send_repeatedly(url: str, token: str, bodies: list[tuple[str, bytes]], counter: Any) -> None:
    """Send the bodies to their paths, again and again, in a separate process."""
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
        while True:
            for path, body in bodies:
                with contextlib.suppress(httpx.HTTPError):
                    client.post(path, content=body)
                counter.value += 1


def make_server_bodies() -> list[tuple[str, bytes]]:
    """Return bodies with too many values, and with nearly the maximum number of unknown fields."""
    many = b"{" + b",".join(b'"%d":1' % number for number in range(1_000_000)) + b"}"
    allowed = b"{" + b",".join(b'"%d":1' % number for number in range(65_000)) + b"}"
    return [
        ("/step", many),
        ("/step", b'{"action":' + many + b"}"),
        ("/step", b'{"action":' + allowed + b"}"),
        ("/reset", many),
    ]


def make_agent_bodies() -> list[tuple[str, bytes]]:
    """Return requests with long prompts, and with calls whose arguments are dear to parse."""
    arguments = "{" + ",".join(f'"{number}":1' for number in range(1_000_000)) + "}"
    call = {"function": {"name": "look", "arguments": arguments}}
    user_message = {"role": "user", "content": "a"}
    prompts = ["word " * 3_000_000, "word " * 200_000]
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    messages.append([user_message, {"role": "assistant", "tool_calls": [call]}])
    path = "chat/completions"
    return [(path, json.dumps({"messages": content}).encode()) for content in messages]


async def measure_calls(
    call: Callable[[], Awaitable[object]], seconds: float
) -> tuple[list[float], int]:
    """Repeat a call; return the sorted durations in milliseconds, and the number of failures."""
    durations_ms, num_failed, end_s = [], 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        start_s = time.perf_counter()
        try:
            await call()
        except (LudusError, httpx.HTTPError):
            num_failed += 1
        durations_ms.append((time.perf_counter() - start_s) * 1000)
        await asyncio.sleep(0.005)
    return sorted(durations_ms), num_failed


async def measure(
    target: str,
    call: Callable[[], Awaitable[object]],
    attack: tuple[str, str, list[tuple[str, bytes]]],
    pids: list[int],
    seconds: float,
) -> Measurement:
    """Measure calls without and with an attack: its URL, token and bodies."""
    quiet_ms, _ = await measure_calls(call, seconds / 4)
    counter = multiprocessing.Value("i", 0)
    attacker = multiprocessing.Process(target=send_repeatedly, args=(*attack, counter), daemon=True)
    attacker.start()
    attacked_ms, num_failed = await measure_calls(call, seconds)
    attacker.kill()
    memory = {str(index): read_peak_memory_mb(pid) for index, pid in enumerate(pids)}
    return Measurement(
        target,
        quiet_p99_ms=round(pick(quiet_ms, 0.99), 1),
        attacked_p50_ms=round(pick(attacked_ms, 0.5), 1),
        attacked_p99_ms=round(pick(attacked_ms, 0.99), 1),
        attacked_max_ms=round(attacked_ms[-1], 1),
        num_calls=len(attacked_ms),
        num_attacks=counter.value,
        peak_memory_mb=memory,
        num_lost=num_failed + sum(size == 0 for size in memory.values()),
    )


def pick(sorted_numbers: list[float], quantile: float) -> float:
    """Return a quantile."""
    return sorted_numbers[min(int(len(sorted_numbers) * quantile), len(sorted_numbers) - 1)]


def read_peak_memory_mb(pid: int) -> int:
    """Return the peak memory of a process; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) // 1024
    return 0


def start(command: list[str], folder: Path, ready_text: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a process in a folder; return the process and its output when it is ready."""
    log_file = folder / f"{time.monotonic_ns()}.log"
    with log_file.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **TOKENS, "PYTHONUNBUFFERED": "1"},
        )
    while ready_text not in (text := log_file.read_text(encoding="utf-8")):
        if process.poll() is not None:
            raise SystemExit(text)
        time.sleep(0.05)
    return process, text


async def measure_gateway(folder: Path, seconds: float) -> Measurement:
    """Measure a tenant's steps behind a gateway that another tenant attacks."""
    (folder / "tenants.toml").write_text(TENANTS, encoding="utf-8")
    command = [LUDUS_PROGRAM, "gateway", "--env", "game=openspiel_env"]
    command += ["--option", "game.game=blackjack", "--port", "0", "--tenants", "tenants.toml"]
    process, text = start(command, folder, "all environments")
    try:
        [grpc_url] = {word for word in text.split() if word.startswith("grpc://")}
        [http_url] = {word for word in text.split() if word.endswith("/envs/game")}
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        options = ConnectOptions(token=TOKENS["OTHER_TOKEN"])
        async with await AsyncEnvClient.connect(grpc_url, options) as client:
            session, _ = await client.open(seed=1)
            attack = (http_url, TOKENS["ATTACKER_TOKEN"], make_server_bodies())
            pids = [process.pid, *map(int, children)]
            seeds = iter(range(10**9))
            return await measure(
                "gateway and server", lambda: session.reset(seed=next(seeds)), attack, pids, seconds
            )
    finally:
        process.terminate()
        process.wait(30)


async def measure_endpoint(folder: Path, seconds: float) -> Measurement:
    """Measure an agent's requests to an endpoint that another agent attacks."""
    program = str(ROOT / "bench/attacked_endpoint.py")
    process, text = start([sys.executable, program, "--max-tokens", "8192"], folder, "}\n")
    try:
        addresses = json.loads(text.splitlines()[-1])
        headers = {"authorization": f"Bearer {addresses['api_key_1']}"}
        async with httpx.AsyncClient(headers=headers, timeout=120) as client:

            async def ask() -> None:
                body = {"messages": [{"role": "user", "content": "red"}]}
                url = f"{addresses['base_url_1']}/chat/completions"
                (await client.post(url, json=body)).raise_for_status()

            attack = (f"{addresses['base_url_0']}/", addresses["api_key_0"], make_agent_bodies())
            return await measure("endpoint of agents", ask, attack, [process.pid], seconds)
    finally:
        process.terminate()
        process.wait(30)


async def main() -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each attack")
    args = parser.parse_args()
    measurements = []
    for measure_target in (measure_gateway, measure_endpoint):
        with tempfile.TemporaryDirectory(prefix="ludus-attack-") as folder:
            measurements.append(await measure_target(Path(folder), args.seconds))
        sys.stdout.write(f"{measurements[-1]}\n")
    command = f"python bench/attack.py --seconds {args.seconds:g}"
    write_runs(RESULTS, command, [asdict(entry) for entry in measurements], machine=machine())
    return int(not all(entry.is_good for entry in measurements))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    sys.exit(asyncio.run(main()))

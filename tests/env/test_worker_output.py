"""The output of workers is bounded, cleaned and marked with its worker."""

from __future__ import annotations

import os
import re
import sys

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.sandbox.confine import Layer
from ludus.env.targets.targets import environment_factory
from ludus.env.types import Transition
from ludus.env.workers import output
from ludus.env.workers.output import MAX_SERVER_BYTES, MAX_WORKER_BYTES
from tests.env.counting_env import CountAction, CountingEnv, CountObservation
from tests.env.served import serve

pytestmark = pytest.mark.slow

LATE_REPORT_ENV = "tests.env.late_report_env"
NUM_FLOOD_BYTES = 500_000


class NoisyEnv(CountingEnv):
    """A counting environment that prints: 1 hidden characters, 2 a flood, 3 a long line."""

    def step(self, action: CountAction) -> Transition[CountObservation]:
        match action.add:
            case 1:
                sys.stderr.write("\x1b]0;t\x07\u202e\nERROR root: forged\n\n")
                sys.stdout.write("without a newline")
                sys.stdout.flush()
            case 2:
                line = b"x" * 99 + b"\n"
                for _ in range(NUM_FLOOD_BYTES // 1000):
                    os.write(2, 10 * line)
            case 3:
                os.write(1, b"y" * 10_000)
        return super().step(action)


async def play(*numbers: int, num_sessions: int = 1, isolation: str = "process") -> None:
    """Play the numbers in one session after another, each in a new worker."""
    options = {"isolation": isolation, "accept_missing": tuple(Layer)}
    async with (
        serve(NoisyEnv, **options) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        for _ in range(num_sessions):
            session, _ = await client.open(seed=1)
            for number in numbers:
                await session.step({"add": number})
            await session.close()


@pytest.mark.parametrize("isolation", ["process", "pool"])
async def test_every_line_names_its_worker_and_is_clean(
    capfd: pytest.CaptureFixture[str], isolation: str
) -> None:
    await play(1, isolation=isolation)
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert all(re.match(r"(fork server|worker) \d+: ", line) for line in lines)
    assert err.replace("\n", "").isprintable()
    texts = [line.partition(": ")[2] for line in lines if line.startswith("worker")]
    assert texts == [r"\x1b]0;t\x07\u202e", "ERROR root: forged", "", "without a newline"]


async def test_output_of_a_worker_is_bounded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "WINDOW_S", 3600.0)
    await play(2, 2)
    err = capfd.readouterr().err
    # The output of the fork server and the last report of dropped bytes do not count.
    assert len(err) < MAX_WORKER_BYTES + 1000
    num_dropped = sum(map(int, re.findall(r"(\d+) bytes of output were dropped", err)))
    num_written = err.count("x") + len(re.findall(r"x$", err, re.MULTILINE))
    # A line that the bound cuts off gets a newline, too.
    assert num_written + num_dropped - 2 * NUM_FLOOD_BYTES in (0, 1)


async def test_output_of_all_workers_is_bounded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "WINDOW_S", 3600.0)
    await play(2, num_sessions=5)
    assert len(capfd.readouterr().err) < 2 * MAX_SERVER_BYTES


async def test_long_lines_are_split(capfd: pytest.CaptureFixture[str]) -> None:
    await play(3)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("worker")]
    assert [line.count("y") for line in lines] == [4096, 4096, 1808]


async def test_output_before_the_report_of_the_process_id_is_marked(
    capfd: pytest.CaptureFixture[str],
) -> None:
    factory = environment_factory(f"{LATE_REPORT_ENV}:PrintingEnv", {})
    options = {"isolation": "process", "accept_missing": tuple(Layer)}
    async with (
        serve(factory, **options) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        await client.open(seed=1)
    lines = [line for line in capfd.readouterr().err.splitlines() if "printed" in line]
    assert lines
    assert all(re.fullmatch(r"worker \d+: printed", line) for line in lines)

"""Helpers that start, stop and observe real runs of the trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ludus.proto.runs import SUMMARY_FILE, MetricsRow, Summary, read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "blackjack" / "tiny.toml"
TRAIN_PROGRAM = ("ludus.trainer", "train")
"""Module and first arguments of the training program."""
SMALL_RUN = (
    "training.num_steps=6",
    "training.groups_per_step=16",
    "rollout.num_groups_in_flight=32",
    "learner.num_minibatches=2",
    "learner.warmup_steps=0",
    "model.warm_start_games=256",
    "eval.num_games=400",
    "eval.num_games_during=100",
    "eval.every_steps=4",
    "environment.baselines=[]",
    "environment.random_policy=null",
    "environment.optimal_policy=null",
)
"""Overrides that reduce the example to a few seconds of training."""


@dataclass(frozen=True)
class Run:
    """A trainer process and its folder."""

    process: subprocess.Popen[bytes]
    folder: Path
    output_file: IO[str]
    """File with the output of the process. An unread pipe would block the process."""

    @property
    def rows(self) -> list[MetricsRow]:
        """Metrics rows written so far."""
        return read_metrics(self.folder)

    @property
    def last_step(self) -> int:
        """Number of the last trained step, or 0."""
        return max((row.step for row in self.rows if row.kind == "train"), default=0)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 600) -> None:
        """Wait until the condition is true; fail if the run exits or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, "the run took too long"
            time.sleep(0.05)

    def finish(self, timeout_s: float = 900) -> Summary:
        """Wait for the run to finish successfully; return its summary."""
        assert self.process.wait(timeout_s) == 0, self.output()
        return Summary.model_validate_json((self.folder / SUMMARY_FILE).read_text())

    def stop(self) -> None:
        """Stop the run after its current step, as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(300) == 130, self.output()

    def output(self) -> str:
        """Return the output of the process, after its exit."""
        self.output_file.seek(0)
        return self.output_file.read()


@contextmanager
def start_run(
    folder: Path,
    *overrides: str,
    flags: tuple[str, ...] = (),
    config: Path | None = None,
    program: tuple[str, ...] = TRAIN_PROGRAM,
) -> Iterator[Run]:
    """Start a run of `config`, or of the small blackjack example, in `folder`; kill it on exit."""
    small_run = SMALL_RUN if config is None else ()
    settings = [f"output_dir={json.dumps(str(folder))}", "name=run", *small_run, *overrides]
    config = config or EXAMPLE
    command = [
        *(sys.executable, "-m", *program, "--config", str(config), *flags),
        *(argument for setting in settings for argument in ("--set", setting)),
    ]
    with tempfile.TemporaryFile("w+") as output_file:
        process = subprocess.Popen(
            command, stdout=output_file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield Run(process, folder / "run", output_file)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def find_processes(marker: str) -> dict[int, str]:
    """Return the processes with `marker` in their environment: command lines by process id."""
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            environment = (folder / "environ").read_bytes()
        except OSError:  # the process has exited, or belongs to another user
            continue
        if marker.encode() in environment and int(folder.name) != os.getpid():
            commands[int(folder.name)] = command.decode(errors="replace")
    return commands


def wait_until_gone(marker: str, timeout_s: float = 300) -> None:
    """Wait until no process has `marker` in its environment.

    Workers exit when their Ray cluster is gone. After a driver is killed, two of Ray's agents keep
    trying for a while to report its exit to the stopped head node.
    """
    deadline = time.monotonic() + timeout_s
    while commands := find_processes(marker):
        assert time.monotonic() < deadline, commands
        time.sleep(0.1)

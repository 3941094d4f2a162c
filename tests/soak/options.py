"""What a soak is started with."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "soak.json"


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """How long, how hard, and what is drawn."""

    minutes: float = 20.0
    """Of faults; the pauses in which everything is counted come on top."""
    sessions: int = 200
    seed: int = 0
    faults_per_s: float = 1.0
    count_every_minutes: float = 5.0
    """Between two pauses."""
    warm_up_opens: int = 1200
    """Sessions opened on each server before: its memory of ended ones is full then."""
    linger_s: float = 30.0
    """For how long a gateway keeps the sessions of a client that went away."""
    idle_timeout_s: float = 60.0
    """After it a gateway forgets sessions that were closed through another one."""
    output: Path | None = None
    """Where the result goes; None writes none."""

    @property
    def settle_s(self) -> float:
        """Until everything has its end: lingering, sweeps, and a busy machine."""
        return self.linger_s + self.idle_timeout_s + 30.0

    @property
    def command(self) -> str:
        """What starts the same soak."""
        default = SoakOptions()
        given = ["--minutes", f"{self.minutes:g}", "--seed", str(self.seed)]
        if self.sessions != default.sessions:
            given += ["--sessions", str(self.sessions)]
        if self.faults_per_s != default.faults_per_s:
            given += ["--faults-per-s", f"{self.faults_per_s:g}"]
        if self.linger_s != default.linger_s:
            given += ["--linger-s", f"{self.linger_s:g}"]
        if self.idle_timeout_s != default.idle_timeout_s:
            given += ["--idle-timeout-s", f"{self.idle_timeout_s:g}"]
        return f'make soak ARGS="{shlex.join(given)}"'

    @classmethod
    def read(cls, argv: Sequence[str] | None = None) -> SoakOptions:
        """The options of a command line."""
        parser = argparse.ArgumentParser(prog="make soak", description=cls.__doc__)
        default = cls(output=RESULTS)
        for field in dataclasses.fields(cls):
            value = getattr(default, field.name)
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                type=Path if field.name == "output" else type(value),
                default=value,
            )
        return cls(**vars(parser.parse_args(argv)))

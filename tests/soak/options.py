"""Options of a soak."""

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
    """Duration, load and random seed of a soak."""

    minutes: float = 20.0
    """Minutes with faults, without the pauses for counts."""
    sessions: int = 200
    seed: int = 0
    faults_per_s: float = 1.0
    count_every_minutes: float = 5.0
    """Minutes between two pauses."""
    warm_up_opens: int = 1200
    """Sessions opened on each server at the start, which fill its records of ended sessions."""
    linger_s: float = 30.0
    """Time that a gateway keeps the sessions of a disconnected client."""
    idle_timeout_s: float = 60.0
    """Time after which a gateway forgets sessions closed through another gateway."""
    output: Path | None = None
    """File for the result; None writes no file."""

    @property
    def max_settle_s(self) -> float:
        """Maximum wait until all sessions have ended, in seconds."""
        return self.linger_s + self.idle_timeout_s + 30.0

    @property
    def command(self) -> str:
        """Return the command that starts the same soak."""
        default = SoakOptions()
        values = ["--minutes", f"{self.minutes:g}", "--seed", str(self.seed)]
        if self.sessions != default.sessions:
            values += ["--sessions", str(self.sessions)]
        if self.faults_per_s != default.faults_per_s:
            values += ["--faults-per-s", f"{self.faults_per_s:g}"]
        if self.linger_s != default.linger_s:
            values += ["--linger-s", f"{self.linger_s:g}"]
        if self.idle_timeout_s != default.idle_timeout_s:
            values += ["--idle-timeout-s", f"{self.idle_timeout_s:g}"]
        return f'make soak ARGS="{shlex.join(values)}"'

    @classmethod
    def read(cls, argv: Sequence[str] | None = None) -> SoakOptions:
        """Parse the options of a command line."""
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

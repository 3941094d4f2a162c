"""The path of the fake trainer and the outcome of a command, for the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FAKE_TRAINER = Path(__file__).with_name("fake_trainer.py")


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


RunCli = Callable[..., Outcome]

"""What the tests of the command line share: where the fake trainer is, and a command's outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FAKE_TRAINER = Path(__file__).with_name("fake_trainer.py")


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code and output."""

    code: int
    out: str
    err: str


RunCli = Callable[..., Outcome]

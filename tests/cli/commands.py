"""Path of the fake trainer and types shared by the command-line tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FAKE_TRAINER_PATH = Path(__file__).with_name("fake_trainer.py")


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


RunCli = Callable[..., Outcome]

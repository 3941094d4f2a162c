"""What is to be started, and how it ended: what the launcher and its client must agree on."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field

import orjson

NOT_STARTED = 127
"""Exit code of a program that could not be started, as shells have it."""
NOT_CONFINED = 126
"""Exit code where a required layer of the sandbox is missing."""


@dataclass(frozen=True, slots=True)
class ProgramOrder:
    """A program to be started; travels as JSON."""

    id: int
    """Names its folder."""
    command: list[str]
    variables: dict[str, str]
    """All that its environment holds, but for the folder of its own (TMPDIR, HOME)."""
    working_folder: str
    readable: list[str] = field(default_factory=list)
    """Files and folders, beside the system's."""

    def to_json(self) -> bytes:
        """The order as it travels."""
        return orjson.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> ProgramOrder:
        """The order that has travelled."""
        return cls(**orjson.loads(text))


@dataclass(frozen=True, slots=True)
class ProgramExit:
    """How a program ended."""

    status: int
    """As `os.wait` has it."""

    @property
    def code(self) -> int:
        """The exit code; the number of the signal that ended it, negative."""
        return os.waitstatus_to_exitcode(self.status)

"""Messages between the launcher of programs and its client."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field

import orjson

NOT_STARTED = 127
"""Exit code of a program that could not be started, by shell convention."""
NOT_CONFINED = 126
"""Exit code of a program for which a required layer of the sandbox is missing."""


@dataclass(frozen=True, slots=True)
class ProgramOrder:
    """A program to start; sent as JSON."""

    id: int
    """Name of the program's folder."""
    command: list[str]
    variables: dict[str, str]
    """All environment variables, except those of the program's folder (TMPDIR, HOME)."""
    working_folder: str
    readable: list[str] = field(default_factory=list)
    """Readable files and folders in addition to the system's."""

    def to_json(self) -> bytes:
        """Encode the order."""
        return orjson.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> ProgramOrder:
        """Decode an order that `to_json` encoded."""
        return cls(**orjson.loads(text))


@dataclass(frozen=True, slots=True)
class ProgramExit:
    """The exit status of a program."""

    status: int
    """Status in the encoding of `os.wait`."""

    @property
    def code(self) -> int:
        """Exit code, or the negative number of the signal that killed the program."""
        return os.waitstatus_to_exitcode(self.status)

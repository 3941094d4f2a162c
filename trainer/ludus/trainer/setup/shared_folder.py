"""Whether actors on other nodes see the run's folder: this one, not one of the same name.

driver    writes a token --> [ run's folder ] --> every actor reads it before it loads anything
          reads answers  <-- [              ] <-- those that will write there answer it
"""

from __future__ import annotations

import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from ludus.proto.errors import ConfigError

_PREFIX = ".token-"
_TIMEOUT_S = 5.0
"""In which a network file system shows to one node what another has written."""
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class FolderToken:
    """A file in the run's folder, of a name that was never given before."""

    folder: Path
    name: str

    @classmethod
    def write(cls, folder: Path) -> FolderToken:
        """A new token; those that a run which was killed has left are gone."""
        for old in folder.glob(f"{_PREFIX}*"):
            old.unlink()
        token = cls(folder, _PREFIX + uuid.uuid4().hex)
        (folder / token.name).touch()
        return token

    def check(self) -> None:
        """Check, in an actor, that its node sees the token.

        Raises:
            ConfigError: it does not.
        """
        if not _appears(self.folder / self.name):
            raise ConfigError(
                f"output_dir: node '{socket.gethostname()}' does not see the run's folder "
                f"'{self.folder}' of the driver; set output_dir to a folder that all nodes share"
            )

    def answer(self, rank: int) -> None:
        """Answer the token from an actor that will write into the folder.

        Raises:
            ConfigError: its node does not see the token, or cannot write there.
        """
        self.check()
        try:
            self._answer_of(rank).touch()
        except OSError as error:
            raise ConfigError(
                f"output_dir: node '{socket.gethostname()}' cannot write into the run's folder "
                f"'{self.folder}' ({error.strerror or error}), where checkpoints go; set "
                "output_dir to a folder that all nodes can write to"
            ) from error

    def check_answers(self, num_ranks: int) -> None:
        """Check, in the driver, that all answers can be seen, and remove them.

        Raises:
            ConfigError: one cannot.
        """
        for rank in range(num_ranks):
            answer = self._answer_of(rank)
            if not _appears(answer):
                raise ConfigError(
                    f"output_dir: what learner rank {rank} writes into the run's folder "
                    f"'{self.folder}' does not reach the driver; set output_dir to a folder that "
                    "all nodes share"
                )
            answer.unlink()

    def remove(self) -> None:
        """Remove the token: no more actors start."""
        (self.folder / self.name).unlink(missing_ok=True)

    def _answer_of(self, rank: int) -> Path:
        return self.folder / f"{self.name}-{rank}"


def _appears(path: Path) -> bool:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True

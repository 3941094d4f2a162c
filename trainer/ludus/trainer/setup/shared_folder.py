"""A check that actors on other nodes see the run's folder, not another folder of the same name.

driver    writes a token   --> [ run's folder ] --> every actor looks for the token when it starts
          reads the replies <-- [              ] <-- actors that will write there reply to the token
"""

from __future__ import annotations

import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from ludus.proto.errors import ConfigError

_TOKEN_PREFIX = ".token-"
VISIBLE_TIMEOUT_S = 5.0
"""Maximum time for a network file system to show one node's files to another node."""
_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class FolderToken:
    """A file with a unique name in the run's folder."""

    folder: Path
    name: str

    @classmethod
    def write(cls, folder: Path) -> FolderToken:
        """Write a new token, and remove the tokens of killed runs."""
        for old_token_path in folder.glob(f"{_TOKEN_PREFIX}*"):
            old_token_path.unlink()
        token = cls(folder, _TOKEN_PREFIX + uuid.uuid4().hex)
        (folder / token.name).touch()
        return token

    def check(self) -> None:
        """Check, in an actor, that its node sees the token."""
        if not _wait_until_visible(self.folder / self.name):
            raise ConfigError(
                f"output_dir: node '{socket.gethostname()}' does not see the run's folder "
                f"'{self.folder}' of the driver; set output_dir to a folder that all nodes share"
            )

    def reply(self, rank: int) -> None:
        """Reply to the token from a learner rank, which will write into the folder."""
        self.check()
        try:
            self._make_reply_path(rank).touch()
        except OSError as error:
            raise ConfigError(
                f"output_dir: node '{socket.gethostname()}' cannot write checkpoints into the "
                f"run's folder '{self.folder}' ({error.strerror or error}); set output_dir to a "
                "folder that all nodes can write to"
            ) from error

    def check_replies(self, num_ranks: int) -> None:
        """Check, in the driver, that the replies of all ranks are visible, and remove them."""
        for rank in range(num_ranks):
            reply_path = self._make_reply_path(rank)
            if not _wait_until_visible(reply_path):
                raise ConfigError(
                    f"output_dir: files that learner rank {rank} writes into the run's folder "
                    f"'{self.folder}' do not reach the driver; set output_dir to a folder that "
                    "all nodes share"
                )
            reply_path.unlink()

    def remove(self) -> None:
        """Remove the token, because no more actors will start."""
        (self.folder / self.name).unlink(missing_ok=True)

    def _make_reply_path(self, rank: int) -> Path:
        return self.folder / f"{self.name}-{rank}"


def _wait_until_visible(path: Path) -> bool:
    """Return whether the file appears within the time limit."""
    deadline_s = time.monotonic() + VISIBLE_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True

"""The counting environment, in a process that may be kept from forking.

While the folder named by the variable holds a file `no-fork`, the fork server, or those that it
forks to make a worker, find no process left; the file says which of them. A process that imports
this without the variable is left as it is.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.env.counting_env import CountingEnv

FOLDER_VARIABLE = "LUDUS_TEST_NO_FORK_IN"
NO_FORK = "no-fork"
ITSELF, ITS_COPY = "itself", "its copy"


class ScarceEnv(CountingEnv):
    """The same."""


def _refuse_forks(folder: Path) -> None:
    fork, importing_pid = os.fork, os.getpid()

    def fork_unless_told() -> int:
        told = folder / NO_FORK
        here = ITSELF if os.getpid() == importing_pid else ITS_COPY
        if told.exists() and told.read_text() == here:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = fork_unless_told


if FOLDER_VARIABLE in os.environ:
    _refuse_forks(Path(os.environ[FOLDER_VARIABLE]))

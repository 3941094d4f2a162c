"""A counting environment in a process whose forks fail on request.

Importing this module replaces `os.fork` if the environment variable names a folder. While this
folder contains a file `no-fork`, forks fail in the kind of process that the file names: the fork
server, or its children that become workers.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.env.counting_env import CountingEnv

FOLDER_VARIABLE = "LUDUS_TEST_NO_FORK_IN"
NO_FORK_FILE = "no-fork"
FORK_SERVER, FORKED_COPY = "fork server", "forked copy"


class ScarceEnv(CountingEnv):
    """A counting environment whose import replaces `os.fork`."""


def _refuse_forks(folder: Path) -> None:
    original_fork, importing_pid = os.fork, os.getpid()

    def fork_or_refuse() -> int:
        no_fork_file = folder / NO_FORK_FILE
        process_name = FORK_SERVER if os.getpid() == importing_pid else FORKED_COPY
        if no_fork_file.exists() and no_fork_file.read_text() == process_name:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return original_fork()

    os.fork = fork_or_refuse


if FOLDER_VARIABLE in os.environ:
    _refuse_forks(Path(os.environ[FOLDER_VARIABLE]))

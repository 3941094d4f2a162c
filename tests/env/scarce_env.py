"""The counting environment, in a process whose forks can fail on request.

While the folder named by the variable contains a file `no-fork`, forks fail in the fork server
or in its copies that become workers; the file says in which. Without the variable, importing
this module changes nothing.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.env.counting_env import CountingEnv

FOLDER_VARIABLE = "LUDUS_TEST_NO_FORK_IN"
NO_FORK_FILE = "no-fork"
FORK_SERVER, FORKED_COPY = "itself", "its copy"


class ScarceEnv(CountingEnv):
    """The counting environment, in a process whose forks can fail."""


def _refuse_forks(folder: Path) -> None:
    original_fork, importing_pid = os.fork, os.getpid()

    def fork_or_refuse() -> int:
        order_file = folder / NO_FORK_FILE
        process_name = FORK_SERVER if os.getpid() == importing_pid else FORKED_COPY
        if order_file.exists() and order_file.read_text() == process_name:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return original_fork()

    os.fork = fork_or_refuse


if FOLDER_VARIABLE in os.environ:
    _refuse_forks(Path(os.environ[FOLDER_VARIABLE]))

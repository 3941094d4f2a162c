"""An environment that prints at once, in a fork server that reports its workers late."""

import os
import sys
import time

from tests.env.counting_env import CountingEnv


class PrintingEnv(CountingEnv):
    """A counting environment that prints a line when it is built."""

    def __init__(self) -> None:
        super().__init__()
        sys.stderr.write("printed\n")


os.register_at_fork(after_in_parent=lambda: time.sleep(0.2))

"""Privileges of a process: none are kept or gained, and other processes cannot inspect it.

A program with a set-user-id bit or file capabilities gains nothing when it is started.
"""

from __future__ import annotations

import sys

from ludus.env.sandbox import kernel


def hide_process() -> None:
    """Hide environment variables, memory and descriptors from the user's other processes.

    Root with the right to trace still sees them. A child that executes another program is
    visible again.
    """
    if sys.platform.startswith("linux"):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def show_process() -> None:
    """Undo `hide_process`, because the kernel requires it to map a user namespace."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def give_up_privileges() -> None:
    """Give up all capabilities, for this process and its descendants."""
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()

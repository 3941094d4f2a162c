"""No new privileges, no old ones, and a process that others of its user cannot look into.

A program that is started with a set-user-id bit, or with file capabilities, gains nothing.
"""

from __future__ import annotations

import sys

from ludus.env.sandbox import kernel


def hide_process() -> None:
    """Keep environment variables, memory and descriptors of this process from others of its user.

    Root with the right to trace still sees them. A child that starts another program does not
    inherit it.
    """
    if sys.platform.startswith("linux"):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def show_process() -> None:
    """Undo `hide_process`: the kernel lets only such a process map its own user namespace."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def give_up_privileges() -> None:
    """Give up all capabilities, for this process and for whatever it starts."""
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()
